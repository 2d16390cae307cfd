"""The model of `benchmarks.ps_order`, as a run names it: layers of a VGG that compute on a device."""

from __future__ import annotations

from torch import Tensor, nn

from benchmarks._priority_worker import vgg_like_on_device
from echelon.models.base import ModelInput

SAMPLES = 64


class OnDevice(nn.Module):
    """Layers that take as long for a batch as those of `benchmarks.priority` for 64 samples, and a head for digits."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = vgg_like_on_device(SAMPLES), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits `[N, 10]` of images `[N, 1, 8, 8]`."""
        return self.head(self.layers(x.flatten(1)))


def on_device(data: ModelInput) -> nn.Module:
    """Build it."""
    return OnDevice()
