"""A model whose checkpoint is large and whose steps are cheap."""

from __future__ import annotations

from torch import nn

from echelon.models.base import ModelInput

WIDTH = 4900


def wide(data: ModelInput) -> nn.Module:
    """Three layers with 24.4 million parameters on small images."""
    inputs = data.channels * data.image_size**2
    return nn.Sequential(
        nn.Flatten(), nn.Linear(inputs, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(),
        nn.Linear(WIDTH, data.classes),
    )  # fmt: skip
