"""Loops over cache-sized pieces, for codecs that turn every element into a code.

Eager torch walks memory once per operation. On a CPU these loops take 131,072 elements at a time, so that all but the
first read stay in the cache: the speed of fused loops without a compiler. Elsewhere there is one piece.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from echelon.compression.base import Codec, Payload, empty

CHUNK = 1 << 17

DecodedChunks = Iterable[tuple[int, int, Tensor]]
"""(start, end, decoded values [end - start] in float32, valid until the next one)."""

Decoder = Callable[[Tensor | None], DecodedChunks]
"""Decodes a payload piece by piece: into parts of the float32 tensor that it is given, or into a scratch of its own."""


def spans(n: int, block: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Yield (start, end) over n elements in whole blocks, cache-sized on a CPU; a ragged last block comes alone."""
    whole = n // block * block
    size = max(CHUNK // block, 1) * block if device.type == "cpu" else max(whole, 1)
    for start in range(0, whole, size):
        yield start, min(start + size, whole)
    if whole < n:
        yield whole, n


def as_rows(tensors: Sequence[Tensor], width: int) -> Tensor:
    """Return 1-D tensors of one type as rows of a new matrix of that width, filled up with zeros."""
    if all(tensor.numel() == width for tensor in tensors):
        return torch.stack(list(tensors))
    filling = tensors[0].new_zeros(width)
    return torch.cat([each for t in tensors for each in (t, filling[: width - t.numel()])]).view(len(tensors), width)


@dataclass(frozen=True)
class Tile:
    """Blocks of equal length, seen as a matrix: all whole blocks of a tensor, or its ragged last one.

    Attributes:
        start: first element.
        rows: number of blocks.
        block: their length.
        step: blocks that fit a cache-sized piece.
        index: number of the first block.
    """

    start: int
    rows: int
    block: int
    step: int
    index: int

    def cut(self, tensor: Tensor) -> npt.NDArray[Any]:
        """View the elements of a 1-D CPU tensor as [rows, block]."""
        matrix: npt.NDArray[Any] = tensor.numpy()[self.start : self.start + self.rows * self.block]
        return matrix.reshape(self.rows, self.block)

    def per_block(self, tensor: Tensor) -> npt.NDArray[Any]:
        """View the blocks' values of a 1-D CPU tensor with one value per block: [rows]."""
        values: npt.NDArray[Any] = tensor.numpy()[self.index : self.index + self.rows]
        return values


def tiles(n: int, block: int) -> list[Tile]:
    """Cut n elements into their whole blocks and the ragged last one; numpy then loops with few calls per piece."""
    whole = n // block
    parts = [Tile(0, whole, block, min(max(CHUNK // block, 1), whole), 0)] if whole else []
    rest = n - whole * block
    return [*parts, Tile(whole * block, 1, rest, 1, whole)] if rest else parts


def check_fits(payload: Payload, target: Tensor) -> None:
    """Refuse to decode into a tensor, of any shape, with another number of elements.

    Raises:
        ValueError: `target` has not as many elements as what the payload stands for.
    """
    if target.numel() != payload.meta.numel:
        raise ValueError(f"message of {payload.meta.numel} elements does not fit a tensor of {target.numel()}")


def write(decode: Decoder, payload: Payload, out: Tensor | None, device: torch.device) -> Tensor:
    """Decode into `out`, or a new tensor, of the payload's shape and dtype; in place where that is float32."""
    meta = payload.meta
    if out is None:
        out = empty(meta.numel, meta.dtype, device).view(meta.shape)
    check_fits(payload, out)
    target = out.view(-1)
    into = target if target.dtype == torch.float32 else None
    for start, end, values in decode(into):
        if into is None:
            target[start:end] = values
    return out


def accumulate(decode: Decoder, target: Tensor, alpha: float) -> None:
    """Add alpha times the decoded pieces to `target`, any shape, in place."""
    flat = target.view(-1)
    for start, end, values in decode(None):
        flat[start:end].add_(values, alpha=alpha)


class DenseCodec(Codec):
    """A codec that has a value for every element, and decodes several payloads in few launches of a GPU."""

    @abstractmethod
    def decoded_together(self, payloads: Sequence[Payload]) -> list[Tensor]:
        """Return the float32 values [numel] of each of several payloads."""

    def extract_together(self, payloads: Sequence[Payload], outs: Sequence[Tensor]) -> None:
        """Do what `extract` does to each of several payloads and tensors, in few launches."""
        for out, values in zip(outs, self.decoded_together(payloads), strict=True):
            out.view(-1).copy_(values)

    def add_together(self, target: Tensor, payloads: Sequence[Payload]) -> None:
        """Do what `add_to` does with each of several payloads, in few launches."""
        for values in self.decoded_together(payloads):
            target.view(-1).add_(values)
