"""The update of a step: gradients clipped by their global norm, applied by the optimizer, and cleared."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from echelon.parallel.local_shards import LocalShards, clip_by_norm

Rates = Sequence[Mapping[str, Any]]
"""Groups of an optimizer, of which the learning rate counts."""


class GradientCopy(Protocol):
    """What makes the updates of a copy of a neighbour's state (see `second_copy.py`)."""

    def take(self) -> None:
        """Take the gradients of a step; all ranks call it before any of them updates."""

    def update(self, rates: Rates) -> None:
        """Make the neighbour's update, with the rates of this rank's groups; nobody is asked."""


class UpdateGate:
    """Lets no rank update before all ranks of a run have the sums of the step.

    So where some ranks have updated, the others can: each holds its gradients until then.

    Attributes:
        holds: this rank has all sums of a step, whose update it has not made.
        made: it has made the update, and has yet to hear of others' parts of it.
    """

    holds = made = False

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Take all ranks of the run."""
        self._group, self._device = group, device

    def wait(self) -> None:
        """Wait until all ranks have their sums: one number is added up."""
        self.holds, self.made = True, False
        dist.all_reduce(torch.zeros(1, device=self._device), group=self._group)


class Update:
    """Unscales, clips by the global norm, steps and clears.

    Attributes:
        gate: what all ranks pass between the last sum and the first change of a parameter; None: there is none.
        copy: what this rank keeps of a neighbour's; None: nothing.
    """

    gate: UpdateGate | None = None
    copy: GradientCopy | None = None

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler, clip_norm: float
    ) -> None:
        """Take what has the gradients, and what applies them; `clip_norm`: 0 clips nothing."""
        self._model, self._optimizer, self._scaler, self._clip_norm = model, optimizer, scaler, clip_norm
        self._divided = model.divided if isinstance(model, LocalShards) else None
        self._clear = _clears(optimizer)

    def __call__(self) -> None:
        """Apply the gradients that are there, and clear them."""
        if self._clip_norm:
            self._clip()
        if self.copy is not None:
            self.copy.take()
        if self.gate is not None:
            self.gate.wait()
        self.apply()
        if self._divided is not None:
            self._divided.share()
        if self.gate is not None:
            self.gate.made = False

    def _clip(self) -> None:
        self._scaler.unscale_(self._optimizer)
        if self._divided is not None and self._scaler.is_enabled():  # the norm is that of all gradients
            self._divided.scale_others(1 / self._scaler.get_scale())
        if isinstance(self._model, LocalShards):
            clip_by_norm(self._model, self._clip_norm)
        else:
            _clip_whole(self._model, self._clip_norm)

    def apply(self) -> None:
        """Make this rank's update, of gradients that are clipped, and clear them; nobody else is asked."""
        self._scaler.step(self._optimizer)
        self._scaler.update()
        if self.copy is not None:
            self.copy.update(self._optimizer.param_groups)
        self._clear()
        if self._divided is not None:
            self._model.zero_grad(set_to_none=True)
        if self.gate is not None:
            self.gate.holds, self.gate.made = False, True


def _clears(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Return what drops the gradients of an optimizer's parameters.

    torch's `zero_grad` tells its profiler of it, which takes as long as a small layer.
    """
    if type(optimizer).zero_grad is not torch.optim.Optimizer.zero_grad:
        return optimizer.zero_grad  # of the user's own

    def clear() -> None:
        """Drop them."""
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    return clear


def _clip_whole(model: nn.Module, clip_norm: float) -> None:
    """Scale the gradients of a whole model down to a norm; those of a table count by its rows, each summed up."""
    for parameter in model.parameters():
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    if not any(gradient.is_sparse for gradient in gradients):
        nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        return
    values = [gradient.values() if gradient.is_sparse else gradient for gradient in gradients]
    share = (clip_norm / (nn.utils.get_total_norm(values) + 1e-6)).clamp(max=1.0)
    for each in values:
        each.mul_(share)
