"""Local SGD: replicas take `period` steps by themselves, then average (Stich 2019, arXiv:1805.09767).

Helps: Slow links: traffic is divided by the period, and `overlap` hides what is left of it.
Costs: replicas drift apart between averages, which costs accuracy if the period is too long; a copy of the parameters
    (with `overlap`, three).
Needs: at least 20 periods in a run.

After every `period` steps each replica i takes the mean of all, x_i <- sum_j n_j x_j / sum_j n_j, where n_j is the
number of samples that replica j has seen since the last average. Replicas also average after the last step of a run.
With `start`, the first steps are synchronous (post-local SGD, Lin et al. 2020, arXiv:1808.07217).

An optimizer that divides a gradient by its size (Adam and others) moves less along gradients that are noisier, as those
of a part of the batch are: where most is noise, as with tables of embeddings, replicas learn as if the learning rate
were the root of their number times smaller (the square-root rule of Malladi et al. 2022, arXiv:2205.10287). With
`outer_lr` they go so many times as far as their mean change; `diloco`, with its momentum, needs no such setting.

With `overlap` = tau, replicas compute tau more steps while the mean travels, and keep what they learn in these steps
(CoCoD-SGD, Shen et al. 2019, arXiv:1906.12043; delayed averaging, Zhou et al. 2020, arXiv:2006.00441):

    x_i <- x_i + (sum_j n_j y_j / sum_j n_j - y_i)      y_j: x_j tau steps ago

At a large learning rate many such steps add noise: make `overlap` no longer than the link needs. A codec that leaves
something out leaves it in the replica: the mean of the replicas is what it would be without.

Each replica's gradient is the mean over its own part of the batch, so use the learning rate of `allreduce`. With
`period=1` and SGD, both take the same steps.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from echelon.core.bounds import Bounds, OneOf, check_bounds
from echelon.optim.traits import normalises
from echelon.sync.averaging.engine import Averaging
from echelon.sync.averaging.period import AUTO, first_period
from echelon.sync.averaging.plan import FEWEST_PERIODS, SHORT_STEPS, AveragingPlan, MeanRule
from echelon.sync.averaging.settings import AveragingSettings
from echelon.sync.base import Sync, SyncContext


@dataclass(frozen=True)
class LocalSettings(AveragingSettings):
    """Settings of `local`.

    Attributes:
        period: steps between averages; auto: chosen as the run goes, so that communication takes about a tenth of the
            time where a run of its length allows that.
        start: how many synchronous steps come before the first local one.
        optimizer_state: what an average does to the optimizer's moments: keep each replica's own, average or reset
            them.
        overlap: how many steps are computed while an average travels; less than the period.
        warmup: share of the run, at its start, in which replicas average up to four times as often, and without
            overlap, because they drift apart fastest there; 0: none. Left out: a tenth, or 50 steps if that is more,
            but at most a quarter.
        outer_lr: how many times as far as their mean change replicas go; the root of their number makes up for noisy
            gradients that the optimizer (Adam and others) divides by their size.
    """

    name: ClassVar[str] = "local"
    period: Annotated[int | str, Bounds(least=1, word="auto")]
    start: Annotated[int, Bounds(least=0)] = 0
    optimizer_state: Annotated[str, OneOf(("keep", "average", "reset"))] = "keep"
    overlap: Annotated[int, Bounds(least=0)] = 0
    warmup: Annotated[float | None, Bounds(least=0, most=1)] = None
    outer_lr: Annotated[float, Bounds(above=0)] = 1.0

    def __post_init__(self) -> None:
        check_bounds(self)
        self.plan()

    def plan(self) -> AveragingPlan:
        """Return when what is averaged."""
        return AveragingPlan(
            first_period(self.period, self.overlap),
            start=self.start,
            overlap=self.overlap,
            optimizer_state=self.optimizer_state,
            keep_progress=self.overlap > 0,
            warmup=self.warmup,
            outer_lr=self.outer_lr,
            finishes=True,
            auto=self.period == AUTO,
        )

    def length_notes(self, steps: int) -> list[str]:
        """Say what follows from a run's number of steps, and what a long period costs in a short one."""
        notes = super().length_notes(steps)
        if (
            self.period != AUTO
            and self.plan().period > 4
            and FEWEST_PERIODS * self.plan().period <= steps - self.start < SHORT_STEPS
        ):  # fewer are told of
            notes.append(
                f"in runs of fewer than {SHORT_STEPS} steps, periods above 4 cost 0.4 to 0.7 points of accuracy where "
                "it was measured, and local(4) 0.3: use that if the link allows it"
            )
        return notes

    @property
    def acts_alone(self) -> bool:
        """Whether moments are reset, or a replica goes another way than its own: the mean of one replica is itself."""
        return self.optimizer_state == "reset" or self.outer_lr != 1

    @property
    def synchronous_steps(self) -> int:
        """Steps before the first local one."""
        return self.start

    def optimizer_notes(self, optimizer: str, replicas: int) -> list[str]:
        """Say what replicas may lose with an optimizer that normalises, and what does not."""
        if self.outer_lr != 1 or not normalises(optimizer):
            return []
        return [
            f"{optimizer} divides gradients by their size, and those of a part of the batch are noisier: where most is "
            f"noise, as with embeddings, replicas learn as if --lr were up to {replicas**0.5:.3g} times smaller; "
            f"outer_lr={replicas**0.5:.3g} or diloco({self.period}) makes up for it"
        ]

    def steady(self) -> LocalSettings:
        """Return it without more frequent agreements at the start."""
        return replace(self, warmup=0.0)

    def build(self, context: SyncContext) -> Sync:
        """Build the strategy."""
        return Averaging(context, self.plan(), lambda replicas: MeanRule())


STRATEGY = LocalSettings
