"""Optimizer state divided over replicas: each updates some of the parameters and sends them to the others.

ZeRO stage 1 (Rajbhandari et al. 2020, arXiv:1910.02054): gradients are summed over the replicas as ever, so that with
N replicas each keeps 1/N of the optimizer's state, and the result is that of one optimizer, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.torch_compat import foreach_mul_

Group = dist.ProcessGroup


def divide(sizes: Sequence[int], ranks: int) -> list[int]:
    """Return who updates each of some tensors: the largest first, to whoever has least.

    >>> divide([6, 5, 4, 3], 2)
    [0, 1, 1, 0]
    """
    owners, loads = [0] * len(sizes), [0] * ranks
    for i in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[i] = loads.index(min(loads))
        loads[owners[i]] += sizes[i]
    return owners


class DividedUpdate:
    """Which parameters this rank's optimizer updates, and how the others come by them."""

    def __init__(self, parameters: Iterable[Tensor], group: Group) -> None:
        """Divide the parameters, the same on every rank of the group."""
        self._group = group
        listed = list(parameters)
        self._shares: list[list[Tensor]] = [[] for _ in range(group.size())]
        for parameter, owner in zip(listed, divide([p.numel() for p in listed], group.size()), strict=True):
            self._shares[owner].append(parameter)
        self._owners = {id(parameter): rank for rank, share in enumerate(self._shares) for parameter in share}
        self._rank = group.rank()
        self._others = [parameter for parameter in listed if not self.owns(parameter)]

    def owns(self, parameter: Tensor, rank: int | None = None) -> bool:
        """Whether a rank's optimizer updates a parameter, any shape; `rank`: this one, where not given."""
        return self._owners.get(id(parameter)) == (self._rank if rank is None else rank)

    def keep_own(self, optimizer: torch.optim.Optimizer) -> None:
        """Take the others' parameters out of an optimizer that has not stepped; one group stays at least."""
        self.keep(optimizer, self._rank)

    def keep(self, optimizer: torch.optim.Optimizer, rank: int) -> None:
        """Leave a rank's parameters alone in an optimizer that has not stepped; one group stays at least."""
        for parameter in [each for each in optimizer.state if not self.owns(each, rank)]:
            del optimizer.state[parameter]  # some have it from the start
        for group in optimizer.param_groups:
            group["params"] = [parameter for parameter in group["params"] if self.owns(parameter, rank)]
        kept = [group for group in optimizer.param_groups if group["params"]]
        optimizer.param_groups[:] = kept or optimizer.param_groups[:1]

    def scale_others(self, factor: float) -> None:
        """Multiply the gradients that this rank's optimizer does not have."""
        gradients = [parameter.grad for parameter in self._others if parameter.grad is not None]
        if gradients:
            foreach_mul_(gradients, factor)

    @torch.no_grad()
    def share(self) -> None:
        """Send what this rank has updated to the others, and take what they have."""
        for owner, share in enumerate(self._shares):
            for dtype in dict.fromkeys(parameter.dtype for parameter in share):
                same = [parameter for parameter in share if parameter.dtype == dtype]
                flat = torch.cat([parameter.detach().reshape(-1) for parameter in same])
                dist.broadcast(flat, group=self._group, group_src=owner)
                if owner != self._group.rank():
                    for parameter, values in zip(same, flat.split([p.numel() for p in same]), strict=True):
                        parameter.copy_(values.view_as(parameter))
