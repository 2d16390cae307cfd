"""Error feedback: what a codec leaves out is kept and sent later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from echelon.compression.base import State, Terms
from echelon.compression.transforms.base import SentTensor, SentTogether, Transform
from echelon.torch_compat import foreach_add_

StateDict = dict[str, Tensor | float]


@dataclass(frozen=True)
class ErrorFeedback(Transform):
    """p = g + e, send C(p), keep e = p - decode(C(p)), in the memory "error" [numel].

    Papers: Seide et al. 2014 (1-bit SGD); Karimireddy et al. 2019, arXiv:1901.09847.
    """

    keeps: ClassVar[str] = "error"

    def before(self, terms: Terms, state: State) -> Terms:
        """Add the terms to the memory, which is then what is to be encoded."""
        error = state.elementwise[self.keeps]
        for tensor, weight in terms:
            error.add_(tensor, alpha=weight)
        return [(error, 1.0)]

    def after(self, pending: Tensor, sent: SentTensor, state: State) -> None:
        """Keep what of `pending` [numel] was not sent."""
        sent.subtract_from(pending)

    def before_together(self, terms: Sequence[Terms], states: Sequence[State]) -> list[Terms]:
        """Add the terms of several tensors, as many of each and of equal weights, to their memories."""
        errors = [state.elementwise[self.keeps] for state in states]
        for turn in zip(*terms, strict=True):
            foreach_add_(errors, [tensor for tensor, _ in turn], alpha=turn[0][1])
        return [[(error, 1.0)] for error in errors]

    def after_together(self, pending: Sequence[Tensor], sent: SentTogether, states: Sequence[State]) -> None:
        """Keep what of several tensors, [numel] each, was not sent."""
        sent.subtract_from(pending)


@dataclass(frozen=True)
class ForgetError(Transform):
    """In place of error feedback where a message is (nearly) whole: what waits is dropped.

    Replicas have learnt around what was not sent; all of it at once, after that, would be learnt twice.
    """

    def before(self, terms: Terms, state: State) -> Terms:
        """Leave the terms as they are."""
        return terms

    def after(self, pending: Tensor, sent: SentTensor, state: State) -> None:
        """Zero the memory, whatever of `pending` [numel] was sent."""
        state.elementwise[ErrorFeedback.keeps].zero_()


def resize(states: Sequence[StateDict], workers: int) -> list[StateDict]:
    """Share out one tensor's states over another number of workers; the sum of each memory over workers is kept.

    Args:
        states: each old worker's `State.state_dict()` of the tensor.
        workers: how many there are now.

    Returns:
        each new worker's state: memories are sum / workers (the first one's makes up for rounding), everything else is
        the first old worker's, which steps, thresholds and factors share or adapt again.
    """
    shared: list[StateDict] = [
        {k: v.clone() if isinstance(v, Tensor) else v for k, v in states[0].items()} for _ in range(workers)
    ]
    for key, first in states[0].items():
        if not key.startswith("memory.") or not isinstance(first, Tensor):
            continue
        total = torch.stack([torch.as_tensor(state[key]).double() for state in states]).sum(dim=0)
        part = (total / workers).to(first.dtype)
        for new in shared[1:]:
            new[key] = part.clone()
        shared[0][key] = (total - part.double() * (workers - 1)).to(first.dtype)
    return shared
