"""Averaging of what is state but not a parameter: BatchNorm statistics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import nn


@contextmanager
def averaged_buffers(model: nn.Module, group: dist.ProcessGroup | None) -> Iterator[None]:
    """Give every buffer its mean over the replicas inside the block, and its own value back after it."""
    if group is None or dist.get_world_size(group) == 1:
        yield
        return
    own = [buffer.clone() for buffer in model.buffers()]
    average_buffers(model, group)
    try:
        yield
    finally:
        with torch.no_grad():
            for buffer, value in zip(model.buffers(), own, strict=True):
                buffer.copy_(value)


@torch.no_grad()
def average_buffers(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Replace every buffer by its mean over the replicas, and counters by their maximum.

    Floating-point buffers are averaged in one all-reduce; the others (BatchNorm's number of batches) take the maximum.
    What is equal on all replicas stays as it is to the last bit: a sum of equal values, divided by their number, would
    round for all but powers of two on the way, and a checkpoint would differ from what it was loaded from.
    """
    if group is None or dist.get_world_size(group) == 1:
        return
    floats = [b for b in model.buffers() if b.is_floating_point() and b.numel()]
    if floats:
        wide = torch.float64 if any(b.dtype == torch.float64 for b in floats) else torch.float32
        flat = torch.cat([b.reshape(-1).to(wide) for b in floats])
        first = flat.clone()
        dist.broadcast(first, group=group, group_src=0)
        apart = torch.where(flat == first, 0.0, flat - first)  # a mask's -inf is no distance of NaN
        dist.all_reduce(apart, group=group)
        flat = first + apart / dist.get_world_size(group)
        for buffer, mean in zip(floats, flat.split([b.numel() for b in floats]), strict=True):
            buffer.copy_(mean.view_as(buffer))
    for buffer in model.buffers():
        if not buffer.is_floating_point() and buffer.numel():
            dist.all_reduce(buffer, op=dist.ReduceOp.MAX, group=group)
