"""qsgd: every element rounded at random to a few levels, packed into a few bits.

Helps: Links too slow for int8 (levels=7: an eighth of the bytes of none), above all with +huffman, and averages of
    local and diloco.
Costs: computation to round every element, and more noise than int8.
Needs: nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import Tensor

from echelon.compression import bits
from echelon.compression.blocks import Grid
from echelon.compression.native import Packing
from echelon.compression.quantiser import Quantiser
from echelon.core.bounds import Bounds, check_bounds


@dataclass(frozen=True)
class Qsgd(Quantiser):
    """Round each element at random to one of 2 levels + 1 values between -s and s, where s is its bucket's largest |x|.

    Q(v_i) = s * sign(v_i) * xi_i / levels, where xi_i rounds levels |v_i| / s up or down at random. The paper's
    experiments use this norm, too. Unbiased (E[Q(v)] = v), so there is no error feedback; |Q(v) - v| < s / levels.

    Bits per element: ceil(log2(2 levels + 1)) + 32 / bucket, so 4 for 7 levels and 2 for 1; `+huffman` needs fewer.

    Attributes:
        levels: positive levels; more is more exact, and sends more.
        bucket: elements that share a scale.

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

    def packing(self, numel: int) -> Packing:
        """Return the planes of `numel` codes of `width` bits."""
        return Packing(self.width, numel if self.width == 8 else bits.packed_size(numel))

    def pack(self, codes: Tensor) -> Tensor:
        """Pack codes [n] of `width` bits: one plane of bits after the other."""
        return bits.pack_codes(codes, self.width)

    def unpack(self, packed: Tensor, n: int) -> Tensor:
        """Undo `pack`; returns uint8 codes [n]."""
        return bits.unpack_codes(packed, self.width, n)


CODEC = Qsgd
