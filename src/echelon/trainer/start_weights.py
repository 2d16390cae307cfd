"""The weights that a run starts from: a file's, published ones, or those that another run has trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from echelon.config import load_run_config
from echelon.config.schema import ModelConfig
from echelon.core.errors import UserError
from echelon.core.tuning import read_tuning
from echelon.core.units import first_few
from echelon.data.kept_info import read_info
from echelon.models import LoadedWeights, load_state, load_weights, locate_weights
from echelon.models.tuning.plan import tuning_plan
from echelon.trainer.folder import CONFIG_FILE, check_weights, has_weights
from echelon.trainer.saving import state_of
from echelon.trainer.state import SINCE, averaged


def best_weights(folder: Path, checkpoint: str = "best") -> Mapping[str, Tensor]:
    """Return the weights of a run's checkpoint by plain names, whatever its layout; on the CPU.

    They are their moving average, where there is one. Adapters are apart: `without_tuning` adds them in.

    Args:
        checkpoint: `best`, `newest`, or the number of its step.

    Raises:
        UserError: no such checkpoint that is whole.
    """
    state = state_of(folder, checkpoint)
    return averaged(state)


def best_since(folder: Path) -> int:
    """Return the epoch, counted from 0, since which a run had trained what it did at its best checkpoint.

    Raises:
        UserError: no such checkpoint that is whole.
    """
    return int(state_of(folder, "best").get(SINCE, 0))


def without_tuning(weights: Mapping[str, Tensor], model: nn.Module, config: ModelConfig) -> Mapping[str, Tensor]:
    """Return a run's weights, any shape, as a model takes them that is built by name: adapters are added into layers.

    Args:
        config: of the run.
    """
    return tuning_plan(config.tune, config.frozen_norm).plain(weights, model)


def rebuild(model: nn.Module, config: ModelConfig) -> None:
    """Give a model that is built by name the modules that a run trained it with, in place.

    Args:
        config: of the run.

    Raises:
        UserError: what makes them is not there, or does not.
    """
    tuning_plan(config.tune, config.frozen_norm).rebuild(model)


def bring_weights(config: ModelConfig) -> None:
    """Refuse weights that are not there, before anything starts; published ones are downloaded where they can be.

    Raises:
        UserError: names what is missing, and where it was looked for; or they are of modules that this run has not.
    """
    if not config.weights:
        return
    path = locate_weights(config.weights, config.name, brings=True)
    if not path.exists():
        raise UserError(f"--weights {config.weights}: no such file; name a file of weights, or a run's folder")
    check_weights(str(path))
    is_of_rebuilt(config)


def is_of_rebuilt(config: ModelConfig) -> bool:
    """Whether `config.weights` names a run whose model has modules that `--tune replace` put in, as here.

    Raises:
        UserError: it has others than here, and these would be missed.
    """
    if not config.weights or not has_weights(path := locate_weights(config.weights, config.name)):
        return False
    other = load_run_config(path / CONFIG_FILE).model
    trained, here = (tuning_plan(each.tune, each.frozen_norm) for each in (other, config))
    if trained.rebuilds and not trained.rebuilds_as(here):
        kinds = "+".join(str(spec) for spec in read_tuning(other.tune) if spec.name == "replace")
        raise UserError(
            f"--weights {config.weights}: its model has modules that were put in by --tune '{kinds}': give the same "
            "here, joined by + with what else is tuned"
        )
    return trained.rebuilds


def start_from(model: nn.Module, config: ModelConfig, classes: Sequence[str] = ()) -> LoadedWeights | None:
    """Give a model the weights that `config.weights` names; None: it names none.

    Args:
        model: with modules put in by `--tune replace`, where `is_of_rebuilt`.
        classes: of the data, or the names of its targets: a head that is kept for as many others is remarked on.

    Raises:
        UserError: they are not there, cannot be read, or do not fit.
    """
    if not config.weights:
        return None
    path = locate_weights(config.weights, config.name)
    if has_weights(path):
        weights = without_tuning(best_weights(path), model, load_run_config(path / CONFIG_FILE).model)
        return _remarked(load_state(model, weights, str(path), config.head), path, classes)
    return load_weights(model, path, config.head)


def _remarked(loaded: LoadedWeights, run: Path, classes: Sequence[str]) -> LoadedWeights:
    """Return what was loaded, with a remark where the run's head is kept for as many other classes or targets."""
    kept = read_info(run)
    trained = () if kept is None else kept.classes or kept.target_names
    if loaded.made_anew or not classes or len(trained) != len(classes) or tuple(trained) == tuple(classes):
        return loaded
    what = "classes" if kept is not None and kept.classes else "targets"
    remark = f"its head is kept, and was for as many other {what} ({first_few(trained)}): --head new makes it anew"
    return replace(loaded, remark=remark)
