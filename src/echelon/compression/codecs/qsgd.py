"""qsgd: stochastic rounding to a few levels per bucket, bit-packed.

Helps: As int8 with fewer bytes (levels=7: an eighth), above all together with +huffman, and for averages.
Needs: nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import Tensor

from echelon.compression import bits
from echelon.compression.blocks import Grid
from echelon.compression.quantiser import Quantiser
from echelon.core.bounds import Bounds, check_bounds


@dataclass(frozen=True)
class Qsgd(Quantiser):
    """Q(v_i) = norm * sign(v_i) * xi_i / levels, where xi_i rounds levels |v_i| / norm up or down at random.

    The norm is the bucket's maximum, as in the paper's experiments. The 2 levels + 1 codes are packed at
    ceil(log2(2 levels + 1)) bits: 4 bits for 7 levels, 2 for 1. Unbiased: E[Q(v)] = v; |Q(v) - v| < norm / levels.
    Bits per element: ceil(log2(2 levels + 1)) + 32 / bucket; `+huffman` goes below that.

    Attributes:
        levels: positive levels, 1 to 127.
        bucket: elements that share a norm.

    Paper: Alistarh et al. 2017, "QSGD", arXiv:1610.02132.
    """

    name: ClassVar[str] = "qsgd"
    examples: ClassVar[tuple[str, ...]] = (
        "qsgd",
        "qsgd(levels=1, bucket=128)",
        "qsgd(levels=16)",
        "qsgd(127, 33)",
        "qsgd+huffman",
    )
    levels: Annotated[int, Bounds(least=1, most=127)] = 7
    bucket: Annotated[int, Bounds(least=1, most=131_072)] = 512

    def __post_init__(self) -> None:
        check_bounds(self)

    @property
    def grid(self) -> Grid:
        """`levels` on each side of 0, one scale per bucket."""
        return Grid(self.levels, self.bucket)

    @property
    def width(self) -> int:
        """Bits per code."""
        return (2 * self.levels).bit_length()

    def packed_size(self, numel: int) -> int:
        """Return the bytes of `numel` codes of `width` bits."""
        return numel if self.width == 8 else self.width * bits.packed_size(numel)

    def pack(self, codes: Tensor) -> Tensor:
        """Pack codes of `width` bits: one plane of bits after the other."""
        return bits.pack_codes(codes, self.width)

    def unpack(self, packed: Tensor, n: int) -> Tensor:
        """Undo `pack`; returns uint8 codes [n]."""
        return bits.unpack_codes(packed, self.width, n)


CODEC = Qsgd
