"""Two hidden layers on the flattened image: the smallest thing that learns, for tests and tiny images."""

from __future__ import annotations

from torch import nn

from echelon.core.hints import Hints
from echelon.models.base import ModelInput

HIDDEN = 256
COUNT = "256 * channels * side ** 2 + 257 * classes + 66048"  # of parameters, for who has not imported this


def build(data: ModelInput) -> nn.Module:
    """Build flatten -> 256 -> 256 -> classes with ReLU between."""
    return MLP(
        nn.Flatten(),
        nn.Linear(data.channels * data.image_size**2, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, data.classes),
    )


class MLP(nn.Sequential):
    """(N, channels, S, S) -> (N, classes)."""

    structure = Hints(chain=("*",), tensor_plan={"1": "column", "3": "row"})
