"""ResNet-20 for 32x32 images: He et al. 2016, "Deep Residual Learning for Image Recognition", section 4.2.

A 3x3 convolution, then three stages of three basic blocks with 16, 32 and 64 channels, global average pooling and a
classifier: 6n + 2 = 20 layers, 0.27 M parameters. Shortcuts are the paper's option A: subsample by 2, pad the new
channels with zeros, no parameters. The last BatchNorm's gamma of a block starts at 0, so that a block starts as the
identity (Goyal et al. 2017, section 5.1).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from echelon.core.hints import Hints
from echelon.models.base import ModelInput

BLOCKS_PER_STAGE = 3
WIDTHS = (16, 32, 64)
COUNT = "144 * channels + 65 * classes + 268640"  # of parameters, for who has not imported this


def build(data: ModelInput) -> nn.Module:
    """Build ResNet-20: 269,722 parameters for 3 channels and 10 classes."""
    return ResNet20(data)


class BasicBlock(nn.Module):
    """relu(x' + BN(conv(relu(BN(conv(x)))))), x' the option-A shortcut of x."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, out_channels, 3, stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.stride = stride
        self.new_channels = out_channels - in_channels

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, in, S, S) to (N, out, S / stride, S / stride)."""
        residual = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(residual + self._shortcut(x))

    def _shortcut(self, x: Tensor) -> Tensor:
        if self.stride != 1:
            x = x[:, :, :: self.stride, :: self.stride]
        if self.new_channels:
            before = self.new_channels // 2
            x = F.pad(x, (0, 0, 0, 0, before, self.new_channels - before))
        return x


class ResNet20(nn.Module):
    """(N, channels, S, S) -> (N, classes)."""

    structure = Hints(
        blocks=("blocks.*",),
        chain=(":stem", "blocks.*", ":classify"),
        glue={":stem": ("conv", "bn"), ":classify": ("fc",)},
        tensor_plan={"blocks.*.conv1": "channels_out", "blocks.*.bn1": "channels", "blocks.*.conv2": "channels_in"},
    )

    def __init__(self, data: ModelInput) -> None:
        super().__init__()
        self.conv = nn.Conv2d(data.channels, WIDTHS[0], 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(WIDTHS[0])
        blocks: list[nn.Module] = []
        channels = WIDTHS[0]
        for stage, width in enumerate(WIDTHS):
            for index in range(BLOCKS_PER_STAGE):
                blocks.append(BasicBlock(channels, width, stride=2 if stage > 0 and index == 0 else 1))
                channels = width
        self.blocks = nn.Sequential(*blocks)
        self.fc = nn.Linear(channels, data.classes)
        _initialise(self)

    def stem(self, images: Tensor) -> Tensor:
        """Map images to the first maps (N, 16, S, S)."""
        return F.relu(self.bn(self.conv(images)))

    def classify(self, x: Tensor) -> Tensor:
        """Map the last maps (N, 64, S / 4, S / 4) to logits (N, classes)."""
        return self.fc(x.mean(dim=(2, 3)))

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (N, classes)."""
        return self.classify(self.blocks(self.stem(images)))


def _initialise(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(module, BasicBlock):
            nn.init.zeros_(module.bn2.weight)
