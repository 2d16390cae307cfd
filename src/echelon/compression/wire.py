"""One flat buffer per message: tensors of known dtypes, each padded to eight bytes, varying lengths in front."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

Layout = tuple[tuple[torch.dtype, int | None], ...]
"""Dtype and number of elements of each tensor of a payload; None where it depends on the values."""

_ALIGN = 8


def _padded(n_bytes: int) -> int:
    return -(-n_bytes // _ALIGN) * _ALIGN


def packed_bytes(layout: Layout) -> int | None:
    """Return the length of the buffer in bytes, without lengths in front; None if a length is open."""
    total = 0
    for dtype, count in layout:
        if count is None:
            return None
        total += _padded(count * dtype.itemsize)
    return total


def pack(tensors: Sequence[Tensor], with_lengths: bool) -> Tensor:
    """Write 1-D tensors into one uint8 buffer on their device."""
    if len(tensors) == 1 and not with_lengths and tensors[0].nbytes % _ALIGN == 0:
        return tensors[0].view(torch.uint8)
    lengths = torch.tensor([t.numel() for t in tensors], dtype=torch.int64)
    parts = [lengths.to(tensors[0].device), *tensors] if with_lengths else list(tensors)
    buffer = torch.empty(sum(_padded(p.nbytes) for p in parts), dtype=torch.uint8, device=parts[0].device)
    start = 0
    for part in parts:
        end = start + part.nbytes
        buffer[start:end] = part.view(torch.uint8)
        start += _padded(part.nbytes)
        buffer[end:start] = 0
    return buffer


def unpack(buffer: Tensor, layout: Layout) -> list[Tensor]:
    """Read the 1-D tensors of a layout from a uint8 1-D buffer; they share its memory where alignment allows.

    Raises:
        ValueError: the buffer is too short for them, or the lengths in front are not those of the layout.
    """
    if buffer.storage_offset() % _ALIGN:
        buffer = buffer.clone()
    counts = [count for _, count in layout]
    start = 0
    if any(count is None for count in counts):
        start = 8 * len(layout)
        if buffer.numel() < start:
            raise ValueError(f"message of {buffer.numel()} bytes is shorter than its header of {start}")
        sent = buffer[:start].view(torch.int64).tolist()
        if any(c < 0 or (known is not None and known != c) for c, known in zip(sent, counts, strict=True)):
            raise ValueError(f"message says lengths {sent}, expected {counts}")
        counts = sent
    tensors = []
    for (dtype, _), count in zip(layout, counts, strict=True):
        size = (count or 0) * dtype.itemsize
        if buffer.numel() < start + size:
            raise ValueError(f"message of {buffer.numel()} bytes ends before byte {start + size}")
        tensors.append(buffer[start : start + size].view(dtype))
        start += _padded(size)
    return tensors
