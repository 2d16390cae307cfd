"""The model that a run has trained: its best weights, in the caller's own class or in that of a name."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from torch import nn

from echelon.config import RunConfig
from echelon.core.errors import UserError
from echelon.core.features import USUAL_FEATURES, FeatureChoice
from echelon.data import DataInfo, Source
from echelon.data.kept_info import read_info
from echelon.data.transforms import NO_TRANSFORMS, Transforms
from echelon.models import build_model
from echelon.models.keras_model import KerasModule
from echelon.models.trial import own_copy
from echelon.models.tuning.plan import UNTUNED, TuningPlan
from echelon.run.machine import say
from echelon.run.resolve import source_of, tuning_of
from echelon.tasks.base import Task
from echelon.tasks.registry import TaskChoice
from echelon.trainer.assemble import UserObjects
from echelon.trainer.inputs import model_input
from echelon.trainer.start_weights import best_weights

KERAS_FILE = "model.keras"


@dataclass(frozen=True)
class TrainedModel:
    """A run's model with what it takes to use it.

    Attributes:
        model: with the weights of a checkpoint, on the CPU, in evaluation mode.
        info: what is known of the data that it was trained on.
        task: fitted to that data.
        folder: of the run, which keeps the tokeniser and what was measured of columns.
        source: the data itself; None: it was not opened.
        transforms: of the caller's own, for inputs.
        tuning: what was trained of the model.
        features: what a sound becomes.
    """

    model: nn.Module
    info: DataInfo
    task: Task
    config: RunConfig
    folder: Path
    source: Source | None = None
    transforms: Transforms = NO_TRANSFORMS
    tuning: TuningPlan = UNTUNED
    features: FeatureChoice = USUAL_FEATURES


def best_model(folder: Path, config: RunConfig, objects: UserObjects) -> nn.Module:
    """Return a run's model with its best weights, in evaluation mode, on the CPU.

    Args:
        objects: what the caller gave in place of names; the model given stays as it is.

    Raises:
        UserError: no whole checkpoint; the data, which a named model is built for, is gone; or the model is another.
    """
    weights = best_weights(folder)
    if objects.model is None:
        return load_trained(folder, config, objects).model
    model, tuning = own_copy(objects.model).cpu(), tuning_of(config.model)
    tuning.rebuild(model)
    model.load_state_dict(tuning.plain(weights, model))
    return model.eval()


def load_trained(
    folder: Path, config: RunConfig, objects: UserObjects, checkpoint: str = "best", with_data: bool = False
) -> TrainedModel:
    """Return a run's model with what it takes to use it, by what the run keeps of its data.

    Args:
        objects: what the caller gave in place of names; the model given stays as it is.
        checkpoint: `best`, `newest`, or the number of its step.
        with_data: open the data, too; runs that keep nothing of it open it anyway.

    Raises:
        UserError: no such checkpoint that is whole; the data is needed and gone; or the model is another.
    """
    weights = best_weights(folder, checkpoint)
    info, source, choice = read_info(folder), objects.source, source_of(config, folder)
    if source is None and (with_data or info is None):
        source = choice.open()
    if source is not None:
        info = source.info
    assert info is not None
    task = TaskChoice.of(config).fitted(info, objects.of_task)
    if objects.model is not None:
        model = own_copy(objects.model).cpu()
    else:
        model = build_model(config.model, model_input(info, task))
    tuning = tuning_of(config.model)
    tuning.rebuild(model)
    try:
        model.load_state_dict(tuning.plain(weights, model))
    except RuntimeError as error:
        reason = str(error).strip().splitlines()[-1].strip()
        raise UserError(f"{folder}: its weights do not fit the model {config.model.name} ({reason})") from error
    return TrainedModel(
        model.eval(), info, task, config, folder, source, objects.transforms, tuning, choice.preparation.features
    )


def write_keras_file(path: Path, config: RunConfig, objects: UserObjects | None) -> None:
    """Write the best model of a run to its folder as `model.keras`, whole or not at all; nothing of other models.

    A model that cannot be written is said: the run is complete without it.
    """
    objects = objects or UserObjects()
    unfinished = path / f".unfinished-{KERAS_FILE}"
    try:
        if not _may_be_keras(path, config, objects):
            return
        model = best_model(path, config, objects)
        if not isinstance(model, KerasModule):
            return
        model.write(unfinished)
        unfinished.replace(path / KERAS_FILE)
    except (UserError, OSError, ValueError, TypeError, NotImplementedError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        say(f"{path / KERAS_FILE} was not written ({reason})")
    finally:
        unfinished.unlink(missing_ok=True)


def _may_be_keras(path: Path, config: RunConfig, objects: UserObjects) -> bool:
    """Whether a run's model is one of Keras, or one of the user's whose weights have names such as Keras's have."""
    if objects.model is not None:
        return isinstance(objects.model, KerasModule)
    return ":" in config.model.name and any("/" in name for name in best_weights(path))
