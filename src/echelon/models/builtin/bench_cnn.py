"""A 1.2 M-parameter CNN without BatchNorm for 28x28 and 32x32 images: cheap to compute, costly to communicate.

Nearly all parameters are in one dense layer, as in the CNNs of the early data-parallel papers, so a slow network shows.
"""

from __future__ import annotations

from torch import nn

from echelon.core.hints import Hints
from echelon.models.base import ModelInput

PARAMETERS = 1_200_000


def build(data: ModelInput) -> nn.Module:
    """Build conv 32, conv 64, dense, classes; the dense layer is as wide as makes 1.2 M parameters in all."""
    side = data.image_size // 4
    features = 64 * side * side
    convolutions = (9 * data.channels + 1) * 32 + (9 * 32 + 1) * 64
    hidden = max(1, (PARAMETERS - convolutions - data.classes) // (features + 1 + data.classes))
    return BenchCNN(
        nn.Conv2d(data.channels, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(features, hidden),
        nn.ReLU(),
        nn.Linear(hidden, data.classes),
    )


class BenchCNN(nn.Sequential):
    """(N, channels, S, S) -> (N, classes)."""

    structure = Hints(chain=("*",), tensor_plan={"0": "channels_out", "3": "channels_in", "7": "column", "9": "row"})
