"""A small network of sounds: depthwise convolutions over time in ConvNeXt's form (Liu et al. 2022, arXiv:2201.03545).

What is padding stays zero before every convolution, and normalisation is within a frame: a sound's logits do not depend
on what it is padded to, nor on the rest of its batch. The mask travels as one more channel.

Shapes: N samples, T frames, M mel bands, D width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from echelon.core.errors import UserError
from echelon.core.hints import Hints
from echelon.models.base import ModelInput
from echelon.tasks.nest import TensorSpec


@dataclass(frozen=True)
class SpeechSize:
    """`depth` blocks of width `width`, their hidden layers of `hidden`, their convolutions over `kernel` frames."""

    depth: int = 4
    width: int = 96
    hidden: int = 192
    kernel: int = 9


def build(data: ModelInput) -> nn.Module:
    """Build the network for spectrograms.

    Raises:
        UserError: the data has none.
    """
    specs = data.several
    if not isinstance(specs, dict) or set(specs) != {"features", "mask"}:
        raise UserError(f"--model speech_cnn is for sounds, the data has {data.describe()}: choose another model")
    features: TensorSpec = specs["features"]
    return SpeechCNN(features.shape[-1], data.classes, SpeechSize())


class FrameBlock(nn.Module):
    """x + MLP(norm(conv(x))), frames of padding left at zero."""

    def __init__(self, size: SpeechSize) -> None:
        super().__init__()
        self.conv = nn.Conv1d(size.width, size.width, size.kernel, padding=size.kernel // 2, groups=size.width)
        self.norm = nn.LayerNorm(size.width)
        self.fc1 = nn.Linear(size.width, size.hidden)
        self.fc2 = nn.Linear(size.hidden, size.width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, T, D + 1) to (N, T, D + 1); the last channel is the mask."""
        frames, mask = x[..., :-1], x[..., -1:]
        y = self.conv((frames * mask).mT).mT
        y = self.fc2(nn.functional.gelu(self.fc1(self.norm(y))))
        return torch.cat([frames + y, mask], -1)


class SpeechCNN(nn.Module):
    """Spectrograms (N, T, M) and masks (N, T) -> logits (N, C)."""

    structure = Hints(
        blocks=("blocks.*",),
        chain=(":embed", "blocks.*", ":predict"),
        glue={":embed": ("stem",), ":predict": ("norm", "head")},
        tensor_plan={"blocks.*.fc1": "column", "blocks.*.fc2": "row"},
    )

    def __init__(self, bands: int, classes: int, size: SpeechSize) -> None:
        super().__init__()
        self.stem = nn.Conv1d(bands, size.width, 5, padding=2)
        self.blocks = nn.Sequential(*[FrameBlock(size) for _ in range(size.depth)])
        self.norm = nn.LayerNorm(2 * size.width)
        self.head = nn.Linear(2 * size.width, classes)

    def embed(self, features: Tensor, mask: Tensor) -> Tensor:
        """Map spectrograms and masks to (N, T, D + 1)."""
        there = mask[..., None].to(features.dtype)
        return torch.cat([self.stem((features * there).mT).mT, there], -1)

    def predict(self, x: Tensor) -> Tensor:
        """Map (N, T, D + 1) to logits: of the mean and the largest of the frames that are no padding."""
        frames, mask = x[..., :-1], x[..., -1:]
        mean = (frames * mask).sum(1) / mask.sum(1).clamp(min=1)
        most = frames.masked_fill(mask == 0, -1e4).amax(1)
        return self.head(self.norm(torch.cat([mean, most], -1)))

    def forward(self, features: Tensor, mask: Tensor) -> Tensor:
        """Return logits (N, C)."""
        return self.predict(self.blocks(self.embed(features, mask)))
