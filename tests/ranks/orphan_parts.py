"""A model whose code starts a process that outlives its parent for a moment: an orphan."""

from __future__ import annotations

import subprocess

from torch import nn

from echelon.models.base import ModelInput


def mlp(data: ModelInput) -> nn.Module:
    """Build two layers, beside an orphan that ends by itself."""
    subprocess.run(["sh", "-c", "sleep 0.3 &"], check=True)
    inputs = data.channels * data.image_size**2
    return nn.Sequential(nn.Flatten(), nn.Linear(inputs, 32), nn.ReLU(), nn.Linear(32, data.classes))
