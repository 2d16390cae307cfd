"""What a model is told of the data, and inputs and targets as the data has them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from echelon.data.base import DataInfo
from echelon.models import ModelInput
from echelon.tasks import nest
from echelon.tasks.base import SAMPLE, Task
from echelon.tasks.nest import Nest, TensorSpec


def units_of(task: Task) -> Callable[[Nest], int] | None:
    """Return what counts the units of a loss in targets; None where these are samples."""
    return None if task.unit == SAMPLE else task.units


def model_input(info: DataInfo, task: Task) -> ModelInput:
    """Return the data's and the task's side of a model."""
    return ModelInput(
        task.outputs,
        info.channels,
        info.image_size,
        info.shape,
        info.dtype,
        info.several,
        task.wrong_outputs,
        task.auto_model(info),
        task.takes_records,
        info.rate > 0 and isinstance(info.targets, TensorSpec) and info.targets.ragged,
        info.tightest,
    )


def any_inputs(info: DataInfo, samples: int, dtype: torch.dtype | None = None) -> Nest:
    """Return inputs of the data's shapes, the same in every process: random numbers, or zeros where they are integers.

    Drawn without touching the run's generators.

    Args:
        dtype: in place of the data's own floating-point type.
    """
    generator = torch.Generator().manual_seed(0)

    def random_like(blank: Tensor) -> Tensor:
        """Return a tensor of random numbers in place of zeros; integers stay."""
        if not blank.is_floating_point():
            return blank
        return torch.randn(blank.shape, generator=generator, dtype=dtype or blank.dtype)

    return nest.map_leaves(random_like, nest.blank(info.inputs, samples))


def blank_targets(info: DataInfo, samples: int) -> Nest:
    """Return targets of zeros: a class, or a word, that any data has."""
    return nest.blank(info.targets, samples)
