"""Two hidden layers on the flattened image: the smallest thing that learns, for tests and tiny images."""

from __future__ import annotations

from torch import nn

from echelon.models.base import ModelInput

HIDDEN = 256


def build(data: ModelInput) -> nn.Module:
    """Build flatten -> 256 -> 256 -> classes with ReLU between."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(data.channels * data.image_size**2, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, data.classes),
    )
