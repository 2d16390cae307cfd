"""What a model is told of the data, and inputs as the data has them."""

from __future__ import annotations

import torch
from torch import Tensor

from echelon.data.base import DataInfo
from echelon.models import ModelInput


def model_input(info: DataInfo) -> ModelInput:
    """Return the data's side of a model."""
    return ModelInput(len(info.classes), info.channels, info.image_size, info.shape, info.dtype)


def any_inputs(info: DataInfo, samples: int, dtype: torch.dtype | None = None) -> Tensor:
    """Return inputs of the data's shape, the same in every process: random numbers, or zeros where they are integers.

    Drawn without touching the run's generators.

    Args:
        dtype: in place of the data's own floating-point type.
    """
    blank = model_input(info).blank(samples)
    if not blank.is_floating_point():
        return blank
    generator = torch.Generator().manual_seed(0)
    return torch.randn(blank.shape, generator=generator, dtype=dtype or blank.dtype)
