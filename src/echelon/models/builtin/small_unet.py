"""U-Net for a class of each pixel: Ronneberger et al. 2015, arXiv:1505.04597, a quarter as wide and three levels deep.

Convolutions are padded, so that logits have the size of the image, and normalised by GroupNorm (Wu and He 2018,
arXiv:1803.08494), so that the function does not depend on how a batch is cut over workers. Maps are enlarged by
repeating pixels, whose gradient is deterministic on a GPU too; the convolutions after it learn to smooth.

The skip connections make the forward pass no chain: pipelines refuse it.

Shapes: N samples, H W height and width, C classes.
"""

from __future__ import annotations

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.core.hints import Hints
from echelon.models.base import ModelInput

WIDTHS = (16, 32, 64, 128)
GROUPS = 8


def build(data: ModelInput) -> nn.Module:
    """Build the network: 0.49 M parameters."""
    return SmallUNet(data)


class DoubleConv(nn.Module):
    """Twice a 3x3 convolution, GroupNorm and ReLU."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(GROUPS, out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(GROUPS, out_channels)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, in, H, W) to (N, out, H, W)."""
        return F.relu(self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x))))))


class SmallUNet(nn.Module):
    """(N, channels, H, W) -> (N, C, H, W), for any height and width from 8."""

    structure = Hints(
        blocks=("down.*", "up.*"),
        tensor_plan={
            f"{part}.*.{name}": style
            for part in ("down", "up")
            for name, style in (("conv1", "channels_out"), ("norm1", "channels"), ("conv2", "channels_in"))
        },
    )

    def __init__(self, data: ModelInput) -> None:
        super().__init__()
        into = (data.channels, *WIDTHS)
        self.down = nn.ModuleList(DoubleConv(a, b) for a, b in zip(into, WIDTHS, strict=False))
        wide = WIDTHS[::-1]
        self.up = nn.ModuleList(DoubleConv(a + b, b) for a, b in pairwise(wide))
        self.head = nn.Conv2d(WIDTHS[0], data.classes, 1)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (N, C, H, W)."""
        skips: list[Tensor] = []
        x = images
        for block in self.down:
            x = block(F.max_pool2d(x, 2) if skips else x)
            skips.append(x)
        for block, skip in zip(self.up, skips[-2::-1], strict=True):
            x = block(torch.cat([F.interpolate(x, size=skip.shape[-2:], mode="nearest"), skip], 1))
        return self.head(x)
