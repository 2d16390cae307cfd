"""The model that a run has trained: its best weights, in the caller's own class or in that of a name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from torch import Tensor, nn

from echelon.config import RunConfig
from echelon.data import open_data
from echelon.models import build_model
from echelon.run.parcel import own_copy
from echelon.tasks.registry import TaskChoice
from echelon.trainer.assemble import UserObjects
from echelon.trainer.inputs import model_input
from echelon.trainer.saving import best_state


def best_weights(folder: Path) -> Mapping[str, Tensor]:
    """Return the weights of a run's best checkpoint by plain names, whatever its layout; on the CPU.

    They are their moving average, where there is one.

    Raises:
        UserError: no whole checkpoint.
    """
    state = best_state(folder)
    weights: Mapping[str, Tensor] = state["ema"]["average"] if state["ema"] else state["model"]
    return weights


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
        model = build_model(replace(config.model, weights=""), model_input(source.info, task))
    model.load_state_dict(weights)
    return model.eval()
