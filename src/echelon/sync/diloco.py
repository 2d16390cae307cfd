"""DiLoCo: an outer optimizer steps by what replicas did in `period` steps (Douillard et al. 2023, arXiv:2311.08105).

    Delta = sum_j n_j (theta - x_j) / sum_j n_j         n_j: samples seen by replica j in the period
    v <- mu v + Delta                                   mu: outer_momentum
    theta <- theta - outer_lr (Delta + mu v)            Nesterov
    x_j <- theta

Where a run ends within a period, its replicas take their mean, Delta, without an outer step. The inner optimizer is the
run's own; its moments stay with each replica (`optimizer_state=keep`). BatchNorm statistics are averaged.

Streaming DiLoCo (Douillard et al. 2025, arXiv:2501.18512): the model is cut into `fragments`; fragment p agrees at the
steps t = p period / fragments (mod period), so that each parameter is synchronised once per period and the peak of the
traffic is smaller. With `overlap` = tau its mean travels behind tau steps of computation, after which

    x_j <- alpha x_j + (1 - alpha) theta                alpha 0.5 unless given; without overlap 0

Helps: Very slow links, such as between sites: replicas agree every 20 to 500 steps.
Needs: at least 20 periods in a run: the paper's outer momentum suits 100 and more.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from echelon.compression import Compression
from echelon.core.bounds import Bounds, OneOf, check_bounds
from echelon.core.errors import UserError
from echelon.core.state_tree import StateTree, StateView
from echelon.sync.averaging.engine import Averaging
from echelon.sync.averaging.plan import AveragingPlan, check_deltas, length_notes
from echelon.sync.base import Sync, SyncContext
from echelon.sync.settings import SyncSettings
from echelon.sync.state_bytes import Piece, StateBytes, by_averaging

OVERLAPPED_ALPHA = 0.5
PAPER_LR, PAPER_MOMENTUM = 0.7, 0.9
MEMORY_SHARE = 10
"""The outer momentum's memory, 1 / (1 - momentum) periods, is at most the run's by this."""


@dataclass(frozen=True)
class DilocoSettings(SyncSettings):
    """When replicas agree, and the outer optimizer.

    Attributes:
        period: local steps between agreements on a parameter.
        outer_lr: learning rate on the mean delta; left out: 1 without momentum, to 0.7 (the paper's) with 0.9.
        outer_momentum: of Nesterov's method; left out: 1 - 10 / periods of the run, from 0 to 0.9 (the paper's), so
            that what it remembers is a tenth of the run.
        fragments: parts of the model that agree at different steps.
        overlap: steps that a mean travels behind the computation.
        alpha: share of a replica's own value that is kept; left out: 0.5 with overlap, else 0.
        optimizer_state: what becomes of the inner optimizer's moments: keep, average or reset.
        warmup: share of the run's steps at its start in which replicas agree up to four times as often; 0: none.
    """

    name: ClassVar[str] = "diloco"
    encodes_gradients: ClassVar[bool] = False
    period: Annotated[int, Bounds(least=1)]
    outer_lr: Annotated[float | None, Bounds(above=0, hint="0.7 is the paper's")] = None
    outer_momentum: Annotated[float | None, Bounds(least=0, below=1, hint="0.9 is the paper's")] = None
    fragments: Annotated[int, Bounds(least=1)] = 1
    overlap: Annotated[int, Bounds(least=0)] = 0
    alpha: Annotated[float | None, Bounds(least=0, below=1)] = None
    optimizer_state: Annotated[str, OneOf(("keep", "average", "reset"))] = "keep"
    warmup: Annotated[float, Bounds(least=0, most=1)] = 0.1

    def __post_init__(self) -> None:
        check_bounds(self)
        self.plan()

    def plan(self) -> AveragingPlan:
        """Return when what is averaged."""
        alpha = self.alpha if self.alpha is not None else (OVERLAPPED_ALPHA if self.overlap else 0.0)
        return AveragingPlan(
            self.period,
            fragments=self.fragments,
            overlap=self.overlap,
            alpha=alpha,
            optimizer_state=self.optimizer_state,
            warmup=self.warmup,
            finishes=True,
        )

    def outer(self, steps: int) -> tuple[float, float]:
        """Return learning rate and momentum of the outer optimizer in a run of so many steps (0: not known)."""
        momentum, lr = self.outer_momentum, self.outer_lr
        if momentum is None:
            momentum = (
                min(PAPER_MOMENTUM, max(0.0, 1 - MEMORY_SHARE * self.period / steps)) if steps else PAPER_MOMENTUM
            )
        if lr is None:
            lr = 1 - (1 - PAPER_LR) * min(1.0, momentum / PAPER_MOMENTUM)
        return lr, momentum

    @property
    def regroups(self) -> bool:
        """Whether all replicas agree on all of the model at one step, from which they can begin a round again."""
        return self.plan().in_one_piece

    def messages(self, steps: int) -> int:
        """Return the agreements on a parameter in a run of so many steps."""
        return self.plan().for_run(steps).agreements(steps)

    def length_notes(self, steps: int) -> list[str]:
        """Say how replicas agree at first, what the outer optimizer is, and whether there are too few periods."""
        notes = length_notes(self.plan().for_run(steps), steps)
        if steps and (self.outer_lr is None or self.outer_momentum is None):
            lr, momentum = self.outer(steps)
            notes.append(
                f"outer_lr {lr:.3g} and outer_momentum {momentum:.3g}, for a run of {steps // self.period} periods"
            )
        return notes

    def check(self, compression: Compression) -> None:
        """Refuse a codec that deltas, or the momentum after them, cannot go with (UserError)."""
        check_deltas(compression)
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
        return Averaging(context, self.plan(), OuterNesterov(*self.outer(context.steps)), self.build)


STRATEGY = DilocoSettings


class OuterNesterov:
    """SGD with Nesterov momentum on the mean delta, the same on all replicas; momenta have the anchors' shapes."""

    centred = False

    def __init__(self, lr: float, momentum: float) -> None:
        self._lr, self._momentum = lr, momentum
        self._velocity: dict[str, Tensor] = {}

    def agree(self, name: str, current: Tensor, anchor: Tensor, mean: Tensor) -> Tensor:
        """Take an outer step from the anchor; replicas go on from there."""
        if not self._momentum:
            return anchor.add_(mean, alpha=self._lr)
        # v is kept with the sign of the delta own - anchor, which is the outer gradient's with a minus.
        if name not in self._velocity:
            self._velocity[name] = torch.zeros_like(anchor)
        velocity = self._velocity[name]
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
