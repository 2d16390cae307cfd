"""int8: every element in 8 bits, with one scale per block.

Helps: Links that are two to four times too slow: a quarter of the bytes, at the accuracy of none.
Costs: computation to round every element (see the measurements).
Needs: nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from torch import Tensor

from echelon.compression.blocks import Grid
from echelon.compression.native import Packing
from echelon.compression.quantiser import Quantiser
from echelon.core.bounds import Bounds, check_bounds


@dataclass(frozen=True)
class Int8(Quantiser):
    """Round each element at random to one of 255 levels between -s and s, where s is the largest |x| of its block.

    For a block x with s = max|x|: c = floor(127 x / s + 127 + u), u uniform on [0, 1); decoded (c - 127) s / 127.
    Unbiased (E[decoded] = x), so there is no error feedback; |decoded - x| < s / 127. 8 + 32 / block bits per element.

    Attributes:
        block: elements that share a scale.

    Paper: Alistarh et al. 2017, arXiv:1610.02132 (QSGD with 127 levels and the maximum norm).
    """

    name: ClassVar[str] = "int8"
    examples: ClassVar[tuple[str, ...]] = ("int8", "int8(block=100)", "int8+huffman")
    takes_rows: ClassVar[bool] = True
    block: Annotated[int, Bounds(least=1, most=131_072)] = 1024

    def __post_init__(self) -> None:
        check_bounds(self)

    @property
    def grid(self) -> Grid:
        """127 levels on each side of 0."""
        return Grid(127, self.block)

    def packed_size(self, numel: int) -> int:
        """Return `numel`: one byte per code."""
        return numel

    def packing(self, numel: int) -> Packing:
        """Return one byte per code, of `numel`."""
        return Packing(8, numel)

    def pack(self, codes: Tensor) -> Tensor:
        """Return the codes [n] as they are."""
        return codes

    def unpack(self, packed: Tensor, n: int) -> Tensor:
        """Return the codes [n] as they are."""
        return packed


CODEC = Int8
