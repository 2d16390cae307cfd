"""What activations pay on their way through split layers: each function with the one that is its gradient.

The loss is computed alike on all ranks of the group, so that a gradient is either whole and alike on all of them, or
one rank's share of a sum. Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053, section 3; Korthikanti et al. 2022,
arXiv:2205.05198, section 4.2.2): f is `enter`, g is `add`; with sequence parallelism `gather` and `scatter_add`.
A dim is cut as `torch.chunk` cuts: the last ranks' parts may be smaller, or empty.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

Group = dist.ProcessGroup


def enter(x: Tensor, group: Group) -> Tensor:
    """Return x, any shape; its gradient is the sum of the ranks' shares."""
    return _Enter.apply(x, group)


def add(x: Tensor, group: Group) -> Tensor:
    """Return the sum of the ranks' x, any shape; the gradient, alike on all ranks, passes."""
    return _Add.apply(x, group)


def gather(x: Tensor, dim: int, total: int, group: Group, shares: bool) -> Tensor:
    """Return the ranks' x, any shape, joined along `dim`, `total` long.

    Args:
        shares: the gradient is a share of a sum on each rank, to be added before it is cut; else it is whole.
    """
    return _Gather.apply(x, dim, total, group, shares)


def scatter_add(x: Tensor, dim: int, group: Group) -> Tensor:
    """Return this rank's part along `dim` of the sum of the ranks' x, any shape; the gradient's parts are joined."""
    return _ScatterAdd.apply(x, dim, group)


def split(x: Tensor, dim: int, group: Group) -> Tensor:
    """Return this rank's part along `dim` of x, any shape, alike on all ranks; the gradient's parts are joined."""
    return _Split.apply(x, dim, group)


def chunk_of(total: int, count: int, index: int) -> tuple[int, int]:
    """Return start and length of one part of `total` as `torch.chunk` cuts.

    >>> [chunk_of(5, 4, i) for i in range(4)]
    [(0, 2), (2, 2), (4, 1), (5, 0)]
    """
    size = -(-total // count)
    start = min(index * size, total)
    return start, min(size, total - start)


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        """Return x."""
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Sum the ranks' gradients."""
        return _sum(grad, ctx.group), None


class _Add(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group) -> Tensor:
        """Sum the ranks' x."""
        return _sum(x, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradient."""
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, total: int, group: Group, shares: bool) -> Tensor:
        """Join the ranks' parts of x along `dim`, `total` long in all."""
        ctx.dim, ctx.group, ctx.shares = dim, group, shares
        return _join(x, dim, total, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Return this rank's part of the gradient; with `shares`, of the sum of the ranks' gradients."""
        cut = _sum_part if ctx.shares else _part
        return cut(grad, ctx.dim, ctx.group), None, None, None, None


class _ScatterAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        """Return this rank's part of the sum of the ranks' x along `dim`."""
        ctx.dim, ctx.group, ctx.total = dim, group, x.shape[dim]
        return _sum_part(x, dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Join the ranks' parts of the gradient."""
        return _join(grad, ctx.dim, ctx.total, ctx.group), None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int, group: Group) -> Tensor:
        """Return this rank's part of x along `dim`."""
        ctx.dim, ctx.group, ctx.total = dim, group, x.shape[dim]
        return _part(x, dim, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """Join the ranks' parts of the gradient."""
        return _join(grad, ctx.dim, ctx.total, ctx.group), None, None


def _sum(x: Tensor, group: Group) -> Tensor:
    # Neither the layer's output nor a gradient is ours to overwrite.
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=group)
    return total


def _part(x: Tensor, dim: int, group: Group) -> Tensor:
    start, length = chunk_of(x.shape[dim], group.size(), group.rank())
    return x.narrow(dim, start, length).contiguous()


def _join(x: Tensor, dim: int, total: int, group: Group) -> Tensor:
    parts = group.size()
    size = chunk_of(total, parts, 0)[1]
    assert x.shape[dim] == chunk_of(total, parts, group.rank())[1], (tuple(x.shape), dim, total)
    mine = _padded(x.movedim(dim, 0), size)
    whole = mine.new_empty(parts * size, *mine.shape[1:])
    dist.all_gather_into_tensor(whole, mine, group=group)
    return whole[:total].movedim(0, dim).contiguous()


def _sum_part(x: Tensor, dim: int, group: Group) -> Tensor:
    parts, total = group.size(), x.shape[dim]
    size = chunk_of(total, parts, 0)[1]
    whole = _padded(x.movedim(dim, 0), parts * size)
    mine = whole.new_empty(size, *whole.shape[1:])
    dist.reduce_scatter_tensor(mine, whole, group=group)
    length = chunk_of(total, parts, group.rank())[1]
    return mine[:length].movedim(0, dim).contiguous()


def _padded(x: Tensor, size: int) -> Tensor:
    """Return x, contiguous, with zeros after it along dim 0 up to `size`."""
    if x.shape[0] == size:
        return x.contiguous()
    return torch.cat([x, x.new_zeros(size - x.shape[0], *x.shape[1:])])
