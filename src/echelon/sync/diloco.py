"""DiLoCo: every `period` steps, an outer optimizer steps along the mean change of the replicas (Douillard et al. 2023).

Helps: Very slow links, such as between sites: replicas agree every 20 to 500 steps.
Costs: replicas drift apart between agreements, which costs accuracy if the period is too long; two copies of the
    parameters (with `overlap`, four).
Needs: at least 20 periods in a run; the paper's outer momentum suits 100 and more.

theta are the parameters that were agreed on last, x_j those of replica j, and n_j the samples that it saw in the period
(arXiv:2311.08105):

    Delta = sum_j n_j (theta - x_j) / sum_j n_j
    v <- mu v + Delta                                   mu: outer_momentum
    theta <- theta - outer_lr (Delta + mu v)            Nesterov
    x_j <- theta

If a run ends within a period, replicas take their mean, without an outer step. The inner optimizer is the run's own.
BatchNorm statistics are averaged.

Streaming DiLoCo (Douillard et al. 2025, arXiv:2501.18512): with `fragments`, parts of the model agree at different
steps of a period, fragment p at t = p period / fragments (mod period). Each parameter still agrees once per period, but
less traffic comes at once. With `overlap` = tau, replicas compute tau more steps while the mean travels, and then take

    x_j <- alpha x_j + (1 - alpha) theta                alpha: see below
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from echelon.compression import Compression
from echelon.core.bounds import Bounds, OneOf, check_bounds
from echelon.core.errors import UserError
from echelon.core.state_tree import StateTree, StateView
from echelon.sync.averaging.engine import Averaging
from echelon.sync.averaging.period import AUTO, first_period
from echelon.sync.averaging.plan import AveragingPlan
from echelon.sync.averaging.settings import AveragingSettings
from echelon.sync.base import Sync, SyncContext
from echelon.sync.state_bytes import Piece, StateBytes, by_averaging

OVERLAPPED_ALPHA = 0.5
PAPER_LR, PAPER_MOMENTUM = 0.7, 0.9
MEMORY_SHARE = 10
"""The outer momentum's memory, 1 / (1 - momentum) periods, is at most the run's by this."""


@dataclass(frozen=True)
class DilocoSettings(AveragingSettings):
    """Settings of `diloco`.

    Attributes:
        period: steps between two agreements on a parameter; auto: chosen as the run goes, so that communication takes
            about a tenth of the time where a run of its length allows that.
        outer_lr: learning rate of the outer optimizer; left out: from 1 without momentum down to 0.7 (the paper's) with
            0.9.
        outer_momentum: Nesterov momentum of the outer optimizer; left out: 1 - 10 / periods of the run, between 0 and
            0.9 (the paper's), so that it remembers a tenth of the run.
        fragments: into how many parts the model is cut that agree at different steps.
        overlap: how many steps are computed while a mean travels.
        alpha: share of its own value that a replica keeps; left out: 0.5 with overlap, else 0.
        optimizer_state: what an agreement does to the inner optimizer's moments: keep each replica's own, average or
            reset them.
        warmup: share of the run, at its start, in which replicas agree up to four times as often; 0: none. Left out:
            a tenth, or 50 steps if that is more, but at most a quarter.
    """

    name: ClassVar[str] = "diloco"
    period: Annotated[int | str, Bounds(least=1, word="auto")]
    outer_lr: Annotated[float | None, Bounds(above=0, hint="0.7 is the paper's")] = None
    outer_momentum: Annotated[float | None, Bounds(least=0, below=1, hint="0.9 is the paper's")] = None
    fragments: Annotated[int, Bounds(least=1)] = 1
    overlap: Annotated[int, Bounds(least=0)] = 0
    alpha: Annotated[float | None, Bounds(least=0, below=1)] = None
    optimizer_state: Annotated[str, OneOf(("keep", "average", "reset"))] = "keep"
    warmup: Annotated[float | None, Bounds(least=0, most=1)] = None

    def __post_init__(self) -> None:
        check_bounds(self)
        self.plan()

    def plan(self) -> AveragingPlan:
        """Return when what is averaged."""
        alpha = self.alpha if self.alpha is not None else (OVERLAPPED_ALPHA if self.overlap else 0.0)
        return AveragingPlan(
            first_period(self.period, self.overlap),
            fragments=self.fragments,
            overlap=self.overlap,
            alpha=alpha,
            optimizer_state=self.optimizer_state,
            warmup=self.warmup,
            finishes=True,
            auto=self.period == AUTO,
        )

    def outer(self, steps: int, period: int = 0) -> tuple[float, float]:
        """Return learning rate and momentum of the outer optimizer in a run of so many steps (0: not known).

        Args:
            period: in which replicas agree at present; 0: the plan's.
        """
        period = period or self.plan().period
        momentum, lr = self.outer_momentum, self.outer_lr
        if momentum is None:
            momentum = min(PAPER_MOMENTUM, max(0.0, 1 - MEMORY_SHARE * period / steps)) if steps else PAPER_MOMENTUM
        if lr is None:
            lr = 1 - (1 - PAPER_LR) * min(1.0, momentum / PAPER_MOMENTUM)
        return lr, momentum

    def steady(self) -> DilocoSettings:
        """Return it without more frequent agreements at the start."""
        return replace(self, warmup=0.0)

    def length_notes(self, steps: int) -> list[str]:
        """Say how replicas agree at first, what the outer optimizer is, and whether there are too few periods."""
        notes = super().length_notes(steps)
        if steps and (self.outer_lr is None or self.outer_momentum is None):
            lr, momentum = self.outer(steps)
            periods = f"for a run of {steps // self.plan().period} periods"
            if self.period == AUTO:
                periods = "at first; they follow the period, for an outer momentum that remembers a tenth of the run"
            notes.append(f"outer_lr {lr:.3g} and outer_momentum {momentum:.3g}, {periods}")
        return notes

    def check(self, compression: Compression) -> None:
        """Refuse a codec that deltas, or the momentum after them, cannot go with (UserError)."""
        super().check(compression)
        if self.outer_momentum != 0 and compression.codec.momentum_inside:
            raise UserError(
                f"--compression {compression}: momentum after decoding, together with error feedback, spoils training; "
                "write diloco(outer_momentum=0), or use int8"
            )

    def state_bytes(self, compression: Compression, piece: Piece) -> StateBytes:
        """Return the memory of what was agreed on last, of the outer momentum and of the codec."""
        return by_averaging(self.plan(), compression, piece, momenta=self.outer_momentum != 0)

    def build(self, context: SyncContext) -> Sync:
        """Build the strategy."""
        outer = partial(self.outer, context.steps)
        return Averaging(context, self.plan(), lambda replicas: OuterNesterov(*outer(), outer))


STRATEGY = DilocoSettings


class OuterNesterov:
    """SGD with Nesterov momentum on the mean delta, the same on all replicas; momenta have the anchors' shapes."""

    centred = False

    def __init__(self, lr: float, momentum: float, outer: Callable[[int], tuple[float, float]] | None = None) -> None:
        """Take the first settings; `outer` returns those of a period that has changed."""
        self._lr, self._momentum, self._outer = lr, momentum, outer
        self._velocity: dict[str, Tensor] = {}

    def settle(self, period: int) -> None:
        """Take the settings that suit a period."""
        if self._outer is not None:
            self._lr, self._momentum = self._outer(period)

    def agree(self, name: str, current: Tensor, anchor: Tensor, mean: Tensor) -> Tensor:
        """Take an outer step from the anchor, by the mean delta of its shape; replicas go on from there."""
        if not self._momentum:
            return anchor.add_(mean, alpha=self._lr)
        # v is kept with the sign of the delta own - anchor, which is the outer gradient's with a minus.
        if name not in self._velocity:
            self._velocity[name] = torch.zeros_like(anchor)
        velocity = self._velocity[name] = self._velocity[name].to(anchor.device)  # a checkpoint's are on the CPU
        velocity.mul_(self._momentum).add_(mean)
        return anchor.add_(mean + self._momentum * velocity, alpha=self._lr)

    def state_dict(self) -> StateTree:
        """Return the momenta (not copied), and the settings, which may have followed from the run's length."""
        return {"lr": self._lr, "momentum": self._momentum, "velocity": dict(self._velocity)}

    def load_state_dict(self, state: StateView) -> None:
        """Take back the momenta and the settings: a run that is made longer goes on with those that it began with."""
        if "velocity" in state:
            self._lr, self._momentum = float(state["lr"]), float(state["momentum"])
        momenta = state.get("velocity", state)
        self._velocity = {name: tensor.clone() for name, tensor in momenta.items()}
