"""SGD's momentum in the workers: each keeps that of its own gradients, and pushes what its step would be.

With one momentum on the servers, stale gradients of many workers add up in it, and training overshoots. A worker's own
momentum sees the gradients of one process, and those of all workers together move the parameters as one process does
(Hakimi et al. 2019, arXiv:1907.11612, DANA-Slim). While a worker computes, each of the others updates the parameters
about once: its gradient is taken where they will be then if the others move as it does (weight prediction; Chen et al.
2018, arXiv:1809.02839).
"""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass

import torch
from torch import Tensor

from echelon.ps.table import KeyRange


@dataclass(frozen=True)
class SgdTerms:
    """What SGD makes of a gradient before the learning rate: torch's arguments of the same names.

    Attributes:
        others: workers beside this one.
    """

    momentum: float
    nesterov: bool
    weight_decay: float
    others: int = 0


class WorkerMomentum:
    """A worker's velocities by key, which begin at zero; they are in no checkpoint."""

    def __init__(self, terms: SgdTerms) -> None:
        self._terms = terms
        self._velocity: dict[int, Tensor] = {}

    def ahead(self, key: KeyRange, part: slice, value: Tensor, lr: float) -> Tensor:
        """Return where a part of a key, 1-D, will be when this worker's gradient arrives, from where it is now.

        Args:
            lr: of one update.
        """
        velocity = self._velocity.get(key.index)
        if velocity is None or not self._terms.others:
            return value
        rate = next(p.rate for p in key.parts if p.start <= part.start < p.stop)
        return value.sub(velocity[part], alpha=lr * rate * self._terms.others * self._terms.momentum)

    @torch.no_grad()
    def apply(self, key: KeyRange, gradient: Tensor, value: Callable[[], Tensor], absent: Container[int]) -> Tensor:
        """Return what SGD would multiply by its rate, in the gradient's memory where that can be.

        Args:
            gradient: of the key, 1-D.
            value: gives the key's value that the gradient was computed on, 1-D; asked for where weights decay.
            absent: parts of the key without a gradient: their velocity stays.
        """
        terms = self._terms
        if key.index not in self._velocity:
            self._velocity[key.index] = torch.zeros_like(gradient)
        velocity = self._velocity[key.index]
        if terms.weight_decay and any(part.decay for part in key.parts):
            now = value()
            for i, part in enumerate(key.parts):
                if part.decay and i not in absent:
                    gradient[part.start : part.stop].add_(now[part.start : part.stop], alpha=terms.weight_decay)
        here = [slice(part.start, part.stop) for i, part in enumerate(key.parts) if i not in absent]
        for where in here if len(here) < len(key.parts) else [slice(None)]:
            velocity[where].mul_(terms.momentum).add_(gradient[where])
            if terms.nesterov:
                gradient[where].add_(velocity[where], alpha=terms.momentum)
            else:
                gradient[where].copy_(velocity[where])
        return gradient
