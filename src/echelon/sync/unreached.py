"""Parameters that a backward pass does not reach: branches that depend on the data, layers that are dropped at random.

DistributedDataParallel reduces a bucket when all of its gradients are there, so one rank that leaves a layer out would
leave all others waiting. Here it sends zeros for it. A parameter that no rank reached keeps no gradient, as in one
process; that is asked of all ranks in the first steps, and in every step once some rank has left something out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from echelon.collectives.hook import GradientHook
from echelon.models.tables import sparse_tables
from echelon.parallel.reach import ReachedMarks


class UnreachedParameters:
    """Completes a rank's last backward pass of a step, and takes back gradients of parameters that no rank reached.

    Args:
        hook: tells whether all buckets were handed over.
    """

    def __init__(self, model: nn.Module, group: dist.ProcessGroup, hook: GradientHook) -> None:
        tables = sparse_tables(model)  # whose rows are reduced at the step
        self._parameters = [p for name, p in model.named_parameters() if p.requires_grad and name not in tables]
        self._marks, self._hook = ReachedMarks(group, self._parameters[0].device), hook
        self._reached: set[int] | None = None  # in the last pass; None: gradients tell, for no pass came before
        self._zeroed: list[nn.Parameter] = []  # what this rank reached in no pass of the step
        self._left_out = False
        self._notes: list[RemovableHandle] = []
        self.silent: Callable[[], AbstractContextManager[object]] = nullcontext

    def accumulating(self) -> None:
        """Hear that a pass comes before the last one: from now on, passes note what they reach."""
        if self._reached is None:
            self._reached = set()
            for parameter in self._parameters:
                self._notes.append(parameter.register_post_accumulate_grad_hook(self._note))

    def _note(self, parameter: Tensor) -> None:
        assert self._reached is not None
        self._reached.add(id(parameter))

    def close(self) -> None:
        """Let go of the parameters, which would keep the group."""
        for note in self._notes:
            note.remove()
        self._notes.clear()

    @contextmanager
    def completing(self) -> Iterator[None]:
        """Surround forward and backward of a step's last pass; afterwards every bucket was handed over."""
        if self._reached is not None:
            self._reached.clear()
        self._zeroed, self.silent = [], nullcontext
        self._hook.is_complete = False
        yield
        if self._hook.is_complete:
            return
        if self._reached is None:
            missing = self._zeroed = [p for p in self._parameters if p.grad is None]
        else:
            missing = [p for p in self._parameters if id(p) not in self._reached]
            self._zeroed = [p for p in missing if p.grad is None]
        self._left_out = True
        with self.silent():
            _Zeros.apply(*missing).backward()

    def settle(self, wait: Callable[[nn.Parameter], None] | None = None) -> None:
        """Take back the zeros of parameters that no rank reached in this step; all ranks call it.

        Args:
            wait: waits for the sum of a gradient, where sums may not have come yet.
        """
        zeroed = {id(parameter) for parameter in self._zeroed}
        reached = self._marks.agreed([id(p) not in zeroed for p in self._parameters], self._left_out)
        for parameter, mark in zip(self._parameters, reached or (), strict=reached is not None):
            if not mark and wait is not None:
                wait(parameter)
            # What a codec had left out of earlier gradients may have come: it is not lost.
            if not mark and parameter.grad is not None and not parameter.grad.any():
                parameter.grad = None


class _Zeros(torch.autograd.Function):
    """A number that depends on parameters, and whose gradients are zeros."""

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        """Return 0."""
        ctx.save_for_backward(*parameters)
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        """Return zeros of the parameters' shapes."""
        return tuple(torch.zeros_like(parameter) for parameter in ctx.saved_tensors)
