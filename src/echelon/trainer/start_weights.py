"""The weights that a run starts from: a file's, published ones, or those that another run has trained."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from echelon.config.schema import ModelConfig
from echelon.core.errors import UserError
from echelon.core.units import first_few
from echelon.data.base import DataInfo
from echelon.data.kept_info import read_info
from echelon.models import LoadedWeights, load_state, load_weights, locate_weights
from echelon.models.tuning.plan import TuningPlan
from echelon.tasks.base import TargetNames
from echelon.trainer.folder import check_weights
from echelon.trainer.saving import state_of
from echelon.trainer.state import SINCE, averaged


def best_weights(folder: Path, checkpoint: str = "best") -> Mapping[str, Tensor]:
    """Return the weights of a run's checkpoint by plain names, whatever its layout; on the CPU.

    They are their moving average, where there is one. Adapters are apart: `TuningPlan.plain` adds them in.

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


def bring_weights(config: ModelConfig, tuning: TuningPlan, trained: TuningPlan | None) -> None:
    """Refuse weights that are not there, before anything starts; published ones are downloaded where they can be.

    Args:
        tuning: what this run trains of the model.
        trained: what the run has trained of it that `config.weights` names; None: it names none.

    Raises:
        UserError: names what is missing, and where it was looked for; or they are of modules that this run has not.
    """
    if not config.weights:
        return
    path = locate_weights(config.weights, config.name, brings=True)
    if not path.exists():
        raise UserError(f"--weights {config.weights}: no such file; name a file of weights, or a run's folder")
    check_weights(str(path))
    starts_rebuilt(config, tuning, trained)


def starts_rebuilt(config: ModelConfig, tuning: TuningPlan, trained: TuningPlan | None) -> bool:
    """Whether `config.weights` names a run whose model has modules that `--tune replace` put in, as here.

    Args:
        tuning, trained: as in `bring_weights`.

    Raises:
        UserError: it has others than here, and these would be missed.
    """
    if not config.weights or trained is None:
        return False
    if trained.rebuilds and not trained.rebuilds_as(tuning):
        raise UserError(
            f"--weights {config.weights}: its model has modules that were put in by --tune "
            f"'{trained.rebuilding_text}': give the same here, joined by + with what else is tuned"
        )
    return trained.rebuilds


def start_from(
    model: nn.Module, config: ModelConfig, trained: TuningPlan | None, data: DataInfo | None = None
) -> LoadedWeights | None:
    """Give a model the weights that `config.weights` names; None: it names none.

    Args:
        model: with modules put in by `--tune replace`, where it `starts_rebuilt`.
        trained: as in `bring_weights`.
        data: that is trained on: a head that is kept for as many other targets is remarked on; None: not looked at.

    Raises:
        UserError: they are not there, cannot be read, or do not fit.
    """
    if not config.weights:
        return None
    path = locate_weights(config.weights, config.name)
    if trained is None:
        return load_weights(model, path, config.head)
    weights = trained.plain(best_weights(path), model)
    loaded = load_state(model, weights, str(path), config.head)
    return loaded if data is None else _remarked(loaded, path, data)


def _remarked(loaded: LoadedWeights, run: Path, data: DataInfo) -> LoadedWeights:
    """Return what was loaded, with a remark where the run's head is kept for as many other targets."""
    kept = read_info(run)
    if kept is None or loaded.made_anew:
        return loaded
    trained, here = TargetNames.of(kept), TargetNames.of(data)
    if not here.names or len(trained.names) != len(here.names) or trained.names == here.names:
        return loaded
    others = f"as many other {trained.noun} ({first_few(trained.names)})"
    return replace(loaded, remark=f"its head is kept, and was for {others}: --head new makes it anew")
