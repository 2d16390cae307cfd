"""A small model with BatchNorm, in float64: losses show whose samples its statistics are of."""

from __future__ import annotations

import time

from torch import Tensor, nn

from echelon.models.base import ModelInput

PAUSE_S = 0.1


class Normed(nn.Module):
    """Two layers on small images with BatchNorm in between; each forward pass of training takes some time."""

    def __init__(self, data: ModelInput) -> None:
        super().__init__()
        numbers = data.channels * data.image_size**2
        layers = nn.Sequential(nn.Linear(numbers, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, data.classes))
        self.layers = layers.double()

    def forward(self, x: Tensor) -> Tensor:
        """Return logits `(B, classes)`."""
        if self.training:
            time.sleep(PAUSE_S)
        logits: Tensor = self.layers(x.flatten(1).double())
        return logits


def normed(data: ModelInput) -> nn.Module:
    """The model."""
    return Normed(data)
