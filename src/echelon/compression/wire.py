"""One flat buffer per message: tensors of known dtypes, each padded to eight bytes, varying lengths in front."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from echelon.compression.state import moved

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
    parts = list(tensors)
    if with_lengths:
        parts.insert(0, moved(np.array([t.numel() for t in tensors], np.int64), tensors[0].device))
    if parts[0].device.type != "cpu":  # one launch
        padding = torch.zeros(_ALIGN, dtype=torch.uint8, device=parts[0].device)
        views = [part.view(torch.uint8) for part in parts]
        return torch.cat([each for view in views for each in (view, padding[: -view.numel() % _ALIGN])])
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
    (tensors,) = unpack_together([buffer], [layout])
    return tensors


def unpack_together(buffers: Sequence[Tensor], layouts: Sequence[Layout]) -> list[list[Tensor]]:
    """Do what `unpack` does to several buffers [n_bytes], of layouts as long; a GPU is waited for once at most."""
    aligned = [buffer.clone() if buffer.storage_offset() % _ALIGN else buffer for buffer in buffers]
    if not any(count is None for layout in layouts for _, count in layout):
        return [_cut(buffer, layout, 0) for buffer, layout in zip(aligned, layouts, strict=True)]
    start = _ALIGN * len(layouts[0])
    for buffer in aligned:
        if buffer.numel() < start:
            raise ValueError(f"message of {buffer.numel()} bytes is shorter than its header of {start}")
    heads = torch.stack([buffer[:start] for buffer in aligned]).view(torch.int64).tolist()
    return [_cut(b, _told(layout, head), start) for b, layout, head in zip(aligned, layouts, heads, strict=True)]


def _told(layout: Layout, lengths: list[int]) -> Layout:
    """Return a layout with the lengths that a message's head tells."""
    counts = [count for _, count in layout]
    if any(c < 0 or (known is not None and known != c) for c, known in zip(lengths, counts, strict=True)):
        raise ValueError(f"message says lengths {lengths}, expected {counts}")
    return tuple((dtype, count) for (dtype, _), count in zip(layout, lengths, strict=True))


def _cut(buffer: Tensor, layout: Layout, start: int) -> list[Tensor]:
    tensors = []
    for dtype, count in layout:
        size = (count or 0) * dtype.itemsize
        if buffer.numel() < start + size:
            raise ValueError(f"message of {buffer.numel()} bytes ends before byte {start + size}")
        tensors.append(buffer[start : start + size].view(dtype))
        start += _padded(size)
    return tensors
