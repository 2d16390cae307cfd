"""A small encoder of speech for CTC: every second frame, then depthwise convolutions over time in ConvNeXt's form.

Convolutions alone recognise speech about as well as recurrent encoders do (Kriman et al. 2020, "QuartzNet",
arXiv:1910.10261). As in `speech_cnn`, padding stays zero before every convolution, the mask travels as one more
channel, and normalisation is within a frame: what is recognised of a sound does not depend on the rest of its batch.
Frames of padding give the blank alone.

Shapes: N samples, T frames, M mel bands, D width, F = ceil(T / 2) frames that come out, S symbols.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from echelon.core.errors import UserError
from echelon.core.hints import Hints
from echelon.models.base import ModelInput
from echelon.models.builtin.speech_cnn import FrameBlock, SpeechSize
from echelon.tasks.nest import TensorSpec
from echelon.tasks.speech_recognition import blank_padding

SIZE = SpeechSize(depth=6, width=144, hidden=432, kernel=11)


def build(data: ModelInput) -> nn.Module:
    """Build 6 blocks of width 144, which see 0.7 seconds to either side: 0.8 M parameters for 30 symbols.

    Raises:
        UserError: the data has no spectrograms.
    """
    specs = data.several
    if not isinstance(specs, dict) or set(specs) != {"features", "mask"}:
        raise UserError(f"--model small_ctc is for sounds, the data has {data.describe()}: choose another model")
    features: TensorSpec = specs["features"]
    return SmallCTC(features.shape[-1], data.classes, SIZE)


class SmallCTC(nn.Module):
    """Spectrograms (N, T, M) and masks (N, T) -> logits (N, F, S), the blank the last symbol."""

    structure = Hints(
        blocks=("blocks.*",),
        chain=(":embed", "blocks.*", ":predict"),
        glue={":embed": ("stem",), ":predict": ("norm", "head")},
        tensor_plan={"blocks.*.fc1": "column", "blocks.*.fc2": "row"},
    )

    def __init__(self, bands: int, symbols: int, size: SpeechSize) -> None:
        super().__init__()
        self.stem = nn.Conv1d(bands, size.width, 5, stride=2, padding=2)
        self.blocks = nn.Sequential(*[FrameBlock(size) for _ in range(size.depth)])
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, symbols)

    def embed(self, features: Tensor, mask: Tensor) -> Tensor:
        """Map spectrograms and masks to (N, F, D + 1), whose last channel is the mask."""
        there = mask[..., None].to(features.dtype)
        return torch.cat([self.stem((features * there).mT).mT, there[:, ::2]], -1)

    def predict(self, x: Tensor) -> Tensor:
        """Map (N, F, D + 1) to logits (N, F, S)."""
        return blank_padding(self.head(self.norm(x[..., :-1])), x[..., -1])

    def forward(self, features: Tensor, mask: Tensor) -> Tensor:
        """Return logits (N, F, S)."""
        return self.predict(self.blocks(self.embed(features, mask)))
