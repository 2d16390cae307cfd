"""The model that a run has trained: its best weights, in the caller's own class or in that of a name."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from echelon.config import RunConfig
from echelon.data import open_data
from echelon.models import build_model
from echelon.run.parcel import own_copy
from echelon.tasks.registry import TaskChoice
from echelon.trainer.assemble import UserObjects
from echelon.trainer.inputs import model_input
from echelon.trainer.start_weights import best_weights


def best_model(folder: Path, config: RunConfig, objects: UserObjects) -> nn.Module:
    """Return a run's model with its best weights, in evaluation mode, on the CPU.

    Args:
        objects: what the caller gave in place of names; the model given stays as it is.

    Raises:
        UserError: no whole checkpoint; the data, which a named model is built for, is gone; or the model is another.
    """
    weights = best_weights(folder)
    if objects.model is not None:
        model = own_copy(objects.model).cpu()
    else:
        source = objects.source or open_data(config.data, config.training.seed, config.task, folder)
        task = TaskChoice.of(config).fitted(source.info, objects.of_task)
        model = build_model(config.model, model_input(source.info, task))
    model.load_state_dict(weights)
    return model.eval()
