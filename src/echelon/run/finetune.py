"""Training on from what another run has trained: its model, tokeniser and preprocessing are known."""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path

from echelon.checkpoint.files import check_whole
from echelon.config import RunConfig, load_run_config
from echelon.config.build import SettingValue
from echelon.core.errors import UserError
from echelon.core.files import DATA_FILE
from echelon.core.tokeniser import RUN_FILE
from echelon.records.file import newest
from echelon.records.kinds import Start
from echelon.run.needs import FINETUNE, check_objects
from echelon.run.trust import check_settings
from echelon.trainer.folder import CHECKPOINTS_FOLDER, CONFIG_FILE, has_checkpoint

OF_THE_RUN = (
    *("model.channels_last", "data.image_size", "data.context", "data.transform", "data.eval_transform"),
    *("data.input", "data.target", "data.columns", "data.augment", "data.features", "data.normalise"),
)
"""Settings of a run that one tuned from it begins with, beside model, weights and tokeniser."""


def tuned_from(folder: Path, overrides: Mapping[str, SettingValue], trust: bool = False) -> dict[str, SettingValue]:
    """Return overrides that start from the best weights of a run, with its model, tokeniser and preprocessing.

    Args:
        overrides: what the user says, which counts.
        trust: import code that the run's description names.

    Raises:
        UserError: the folder holds no run with a checkpoint that is whole, or names code that is not trusted.
    """
    file = folder / CONFIG_FILE
    if not file.exists():
        raise UserError(f"{folder} holds no run: there is no {CONFIG_FILE} in it")
    if not has_checkpoint(folder):
        raise UserError(f"{folder} holds no checkpoint to tune: let it train first, or name weights with --weights")
    if "model.name" not in overrides:
        check_objects(folder, (), FINETUNE)
    config = load_run_config(file)
    default = RunConfig()
    known: dict[str, SettingValue] = {
        name: attrgetter(name)(config) for name in OF_THE_RUN if attrgetter(name)(config) != attrgetter(name)(default)
    }
    known["model.name"], known["model.weights"] = _model(folder, config), str(folder)
    if (folder / DATA_FILE).is_file():
        known["data.measures"] = str(folder)
    if (folder / RUN_FILE).exists():
        known["data.tokeniser"] = str(folder)
    taken = {name: value for name, value in known.items() if name not in overrides}
    code = {name: str(value) for name, value in taken.items() if ":" in str(value) and name != "model.weights"}
    check_settings(code, dict.fromkeys(code, str(file)), trust)
    check_whole(folder / CHECKPOINTS_FOLDER, "best")
    return {**taken, **overrides}


def _model(folder: Path, config: RunConfig) -> str:
    """Return the name of a run's model: what `auto` became, its record knows."""
    if config.model.name != "auto":
        return config.model.name
    start = next(newest(folder, Start), None)
    return start.model if start is not None and start.model else config.model.name
