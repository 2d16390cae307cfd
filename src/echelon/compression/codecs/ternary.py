"""ternary: every element as -s, 0 or s, five of them in a byte.

Helps: Links about ten times too slow, if you accept a loss of accuracy; topk and threshold lost less on CIFAR-10.
Costs: accuracy: the noise of a message is as large as the gradient.
Needs: nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
import torch
from torch import Tensor

from echelon.compression.base import empty
from echelon.compression.blocks import Grid
from echelon.compression.native import Packing
from echelon.compression.quantiser import Quantiser
from echelon.core.bounds import Bounds, check_bounds

_DIGITS = 5


@dataclass(frozen=True)
class Ternary(Quantiser):
    """Send each element as 0 or as the scale s with its sign, at random, so that the mean is right.

    g~_i = s * sign(g_i) * b_i with P(b_i = 1) = |g_i| / s and s = max|g| of the block. Elements beyond `clip` root mean
    squares are cut off first, which keeps s, and so the noise, small. Unbiased except for this clipping. As in the
    paper there is no error feedback, because what it would have to keep would grow.

    1.6 + 32 / block bits per element.

    Attributes:
        block: elements that share a scale.
        clip: largest magnitude, in root mean squares of the block; 0: no clipping.

    Paper: Wen et al. 2017, "TernGrad", arXiv:1705.07878 (clipping at 2.5 standard deviations).
    """

    name: ClassVar[str] = "ternary"
    examples: ClassVar[tuple[str, ...]] = ("ternary", "ternary(clip=0)", "ternary(clip=0)+huffman")
    block: Annotated[int, Bounds(least=1, most=131_072)] = 512
    clip: Annotated[float, Bounds(least=0)] = 2.5

    def __post_init__(self) -> None:
        check_bounds(self)

    @property
    def grid(self) -> Grid:
        """One level on each side of 0, values clipped at `clip` root mean squares."""
        return Grid(1, self.block, self.clip)

    def packed_size(self, numel: int) -> int:
        """Return the bytes of `numel` codes, five a byte."""
        return -(-numel // _DIGITS)

    def packing(self, numel: int) -> Packing:
        """Return the base-3 digits of `numel` codes."""
        return Packing(0, self.packed_size(numel))

    def pack(self, codes: Tensor) -> Tensor:
        """Pack codes 0, 1, 2 [n] as base-3 digits."""
        # Byte i holds elements i, i + m, ..., i + 4m in base 3, so that packing adds up whole contiguous stretches.
        m = self.packed_size(codes.numel())
        padded = torch.nn.functional.pad(codes, (0, _DIGITS * m - codes.numel()))
        packed = padded[(_DIGITS - 1) * m :].clone()
        for digit in range(_DIGITS - 2, -1, -1):
            packed.mul_(3).add_(padded[digit * m : (digit + 1) * m])
        return packed

    def unpack(self, packed: Tensor, n: int) -> Tensor:
        """Undo `pack`; returns uint8 codes [n]."""
        m = packed.numel()
        codes = empty(_DIGITS * m, torch.uint8, packed.device)
        rest = packed
        for digit in range(_DIGITS):
            third = _third(rest)
            torch.sub(rest, third * 3, out=codes[digit * m : (digit + 1) * m])
            rest = third
        return codes[:n]


def _third(x: Tensor) -> Tensor:
    """x // 3 of uint8; numpy has it vectorised, torch is quicker by multiplication."""
    if x.device.type == "cpu":
        return torch.from_numpy(x.numpy() // np.uint8(3))
    return ((x.to(torch.int32) * 171) >> 9).to(torch.uint8)


CODEC = Ternary
