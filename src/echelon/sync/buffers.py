"""Averaging of what is state but not a parameter: BatchNorm statistics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.core.state_tree import StateView
from echelon.models.still_buffers import moving_buffers

_MOST_GATHERED = 3  # replicas: of more, a sum sends less than everybody's statistics to everybody


@contextmanager
def averaged_buffers(
    model: nn.Module, group: dist.ProcessGroup | None, known: list[Tensor] | None = None
) -> Iterator[None]:
    """Give every buffer that moves its mean over the replicas inside the block, and its own value back after it.

    Args:
        known: the means, of the buffers' shapes, if made already; an empty list is filled with them. None: none is.
    """
    if group is None or dist.get_world_size(group) == 1:
        yield
        return
    own = [buffer.clone() for buffer in moving_buffers(model)]
    try:  # a replica may be lost in the middle of it, and the others go on
        if known:
            _set(list(moving_buffers(model)), known)
        else:
            average_buffers(model, group)
            if known is not None:
                known.extend(buffer.clone() for buffer in moving_buffers(model))
        yield
    finally:
        _set(list(moving_buffers(model)), own)


@torch.no_grad()
def average_buffers(model: nn.Module, group: dist.ProcessGroup | None) -> None:
    """Replace every buffer that moves by its mean over the replicas, and counters by their maximum.

    Floating-point and complex buffers are averaged; the others (BatchNorm's number of batches) take the maximum. What
    is equal on all replicas stays as it is to the last bit: a sum of equal values, divided by their number, would round
    for all but powers of two on the way, and a checkpoint would differ from what it was loaded from.
    """
    if group is None or dist.get_world_size(group) == 1:
        return
    buffers = [as_real(buffer) for buffer in moving_buffers(model) if buffer.numel()]
    floats = [b for b in buffers if b.is_floating_point()]
    others = [b for b in buffers if not b.is_floating_point()]
    if floats:
        wide = torch.float64 if any(b.dtype == torch.float64 for b in floats) else torch.float32
        mean = _mean(torch.cat([b.reshape(-1).to(wide) for b in floats]), group)
        _set(floats, list(mean.split([b.numel() for b in floats])))
    if others:  # all in one message: each of them would be a round trip
        flat = torch.cat([b.reshape(-1).long() for b in others])
        dist.all_reduce(flat, op=dist.ReduceOp.MAX, group=group)
        _set(others, list(flat.split([b.numel() for b in others])))


def mean_of_replicas(replicas: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Return what `average_buffers` makes of the replicas' buffers, by name and any shape, from copies of them."""
    means: dict[str, Tensor] = {}
    for name, first in replicas[0].items():
        copies = [as_real(replica[name]) for replica in replicas]
        if copies[0].is_floating_point():
            dtype = copies[0].dtype
            wide = torch.float64 if dtype == torch.float64 else torch.float32
            mean = _from_first([copy.to(wide) for copy in copies]).to(dtype)
            means[name] = torch.view_as_complex(mean) if first.is_complex() else mean
        else:
            means[name] = torch.stack([copy.long() for copy in copies]).amax(0).to(first.dtype)
    return means


def saved_buffers(replicas: Sequence[StateView], averages: bool) -> list[Mapping[str, Tensor]]:
    """Return the buffers in the states that replicas saved of themselves, or those of their moving averages."""
    if not averages:
        return [replica["buffers"] for replica in replicas]
    return [{n: t for n, t in replica["ema"].items() if n in replica["buffers"]} for replica in replicas]


def as_real(tensor: Tensor) -> Tensor:
    """Return a complex tensor, any shape, as real pairs `(..., 2)` in the same memory; a real one as it is."""
    return torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor


def _mean(flat: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the mean of a vector over the ranks of a group, the same bits on all of them."""
    size = dist.get_world_size(group)
    if size <= _MOST_GATHERED:
        copies = [torch.empty_like(flat) for _ in range(size)]
        dist.all_gather(copies, flat, group=group)
        return _from_first(copies)
    first = flat.clone()
    dist.broadcast(first, group=group, group_src=0)
    apart = _apart(flat, first)
    dist.all_reduce(apart, group=group)
    return first + apart / size


def _from_first(copies: Sequence[Tensor]) -> Tensor:
    first = copies[0]
    apart = torch.zeros_like(first)
    for copy in copies[1:]:
        apart += _apart(copy, first)
    return first + apart / len(copies)


def _apart(value: Tensor, first: Tensor) -> Tensor:
    return torch.where(value == first, 0.0, value - first)  # a mask's -inf is no distance of NaN


@torch.no_grad()
def _set(buffers: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for buffer, value in zip(buffers, values, strict=True):
        buffer.copy_(value.view_as(buffer))
