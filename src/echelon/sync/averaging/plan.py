"""When replicas agree, and by which rule."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Protocol

from torch import Tensor

from echelon.compression import Compression
from echelon.compression.base import Codec
from echelon.core.bounds import Bounds, OneOf, check_bounds
from echelon.core.errors import UserError
from echelon.core.state_tree import StateTree, StateView
from echelon.sync.averaging.period import LONGEST, PeriodControl, longest_period


@dataclass(frozen=True)
class AveragingPlan:
    """When what is averaged. Steps count from 1.

    Attributes:
        period: steps from one agreement on a value to the next.
        start: steps of synchronous all-reduce before the first local one.
        fragments: parts of the model that agree at different steps of a period.
        overlap: steps that a fragment travels behind the computation; its mean is applied that much later.
        alpha: share of the replica's own value that is kept when a mean is applied.
        optimizer_state: `keep` moments as they are, `average` them too, or `reset` them at each agreement.
        keep_progress: with overlap, what the replica has learnt while a mean travelled is added to it.
        warmup: share of a run's local steps at their start in which agreements are up to four times as frequent, and
            with `keep_progress` waited for; None: see `warmup_share`.
        outer_lr: how many times as far as the mean change of the replicas' parameters they go.
        finishes: replicas agree after a run's last step, too, within a period: on their mean, with nothing kept.
        auto: the period is chosen as the run goes (see `period`); `period` is the first one.
        dense: how many steps the warm-up is, a multiple of the period (`for_run`).
        last: the run's last local step (`for_run`); 0: not known.

    Raises:
        ValueError: a setting is out of its range.
    """

    period: Annotated[int, Bounds(least=1)]
    start: Annotated[int, Bounds(least=0)] = 0
    fragments: Annotated[int, Bounds(least=1)] = 1
    overlap: Annotated[int, Bounds(least=0)] = 0
    alpha: Annotated[float, Bounds(least=0, below=1)] = 0.0
    optimizer_state: Annotated[str, OneOf(("keep", "average", "reset"))] = "keep"
    keep_progress: bool = False
    warmup: Annotated[float | None, Bounds(least=0, most=1)] = 0.0
    outer_lr: Annotated[float, Bounds(above=0)] = 1.0
    finishes: bool = False
    auto: bool = False
    dense: int = 0
    last: int = 0

    def __post_init__(self) -> None:
        check_bounds(self)
        if self.auto and self.fragments > 1:
            raise ValueError(
                "period=auto is for a model that agrees as a whole, and fragments agree at different steps: give a "
                "period, or leave out fragments"
            )
        if self.fragments > self.period:
            raise ValueError(f"fragments {self.fragments}: use 1 to {self.period}, for one agrees per step of a period")
        if self.overlap >= self.period:
            raise ValueError(f"overlap {self.overlap}: use 0 to {self.period - 1}, less than the period {self.period}")

    @property
    def in_one_piece(self) -> bool:
        """Whether all of the model agrees at once, and no share of a replica's own is kept.

        Moments that travel behind the computation are not known where the parameters were taken.
        """
        whole = self.fragments == 1 and not self.alpha
        return whole and (not self.overlap or self.optimizer_state == "keep")

    def is_due(self, fragment: int, step: int) -> bool:
        """Whether a fragment's deltas are taken after local step `step`: at its offset p * period / fragments."""
        period = self.dense_period if step <= self.dense else self.period
        return step % period == fragment * period // self.fragments

    @property
    def dense_period(self) -> int:
        """Steps between agreements at first: the least divisor of the period, from a quarter of it on, that fits."""
        travels = 0 if self.keep_progress else self.overlap
        least = max(-(-self.period // 4), travels + 1, self.fragments)
        return next(divisor for divisor in range(least, self.period + 1) if self.period % divisor == 0)

    def control(self) -> PeriodControl:
        """Return what decides on the period of the run that this is the plan of (`for_run`)."""
        most = longest_period(self.last, self.dense, FEWEST_PERIODS, self.overlap + 1)
        return PeriodControl(
            most, self.overlap, self.dense, self.last, dense_waits=self.keep_progress or not self.overlap
        )

    def overlap_at(self, step: int) -> int:
        """Return how many steps travels what is taken after local step `step`.

        In the warm-up, where replicas learn fastest and drift apart fastest, none where it is the replica's progress
        that has to be added to a mean that is late.
        """
        return 0 if self.keep_progress and step <= self.dense else self.overlap

    def steps_to_landing(self, step: int) -> int:
        """Return the steps from after local step `step` to the next one after which a mean of all is applied."""
        taken = max(1, step - self.overlap)
        while not (self.is_due(0, taken) and taken + self.overlap_at(taken) > step):
            taken += 1
        return taken + self.overlap_at(taken) - step

    def for_run(self, steps: int) -> AveragingPlan:
        """Return the plan of a run of so many steps (0: not known): at least a period begins with frequent ones."""
        share = warmup_share(self._local(steps)) if self.warmup is None else self.warmup
        if self.auto:
            return replace(self, dense=round(share * self._local(steps)), last=self._local(steps))
        periods = max(1, round(share * self._local(steps) / self.period)) if share and steps else 0
        dense = periods * self.period if self.dense_period < self.period else 0
        return replace(self, dense=dense, last=self._local(steps) if self.finishes else 0)

    def at_end(self, ends_period: bool) -> AveragingPlan:
        """Return what holds for the agreement after the last step: nothing travels on, and the model alone is averaged.

        Args:
            ends_period: it is due anyway; else replicas take their mean.
        """
        last = replace(self, overlap=0, alpha=0.0, keep_progress=False, optimizer_state="keep")
        return last if ends_period else replace(last, outer_lr=1.0)

    def agreements(self, steps: int) -> int:
        """Return how often a fragment agrees in a run of so many steps; 0 where that is not known."""
        if self.auto:
            return 0
        local = self._local(steps)
        dense = min(self.dense, local)
        finish = self.finishes and local > 0 and not self.is_due(0, local)
        return dense // self.dense_period + (local - dense) // self.period + finish

    def _local(self, steps: int) -> int:
        return max(0, steps - self.start)


def warmup_share(steps: int) -> float:
    """Return the share of a run of so many steps in which replicas agree often: a tenth, and more in a short run.

    Most is learnt in the first dozens of steps, where replicas that drift apart learn less. With a tenth of 172 steps,
    8 seeds of a small network lost 0.5 points of accuracy (0.7 with overlap), with a quarter 0.3 (0.35).
    """
    return max(0.1, min(0.25, 50 / steps)) if steps else 0.1


class Rule(Protocol):
    """What an agreement makes of a parameter's mean delta.

    Attributes:
        centred: replicas stay apart, around a centre that is the result; else they take the agreed value.
    """

    centred: bool

    def settle(self, period: int) -> None:
        """Hear that replicas agree every so many steps from now on."""

    def agree(self, name: str, current: Tensor, anchor: Tensor, mean: Tensor) -> Tensor:
        """Move the anchor, in place, and return the value that this replica goes on from; all of one shape.

        Args:
            current: this replica's value now.
            anchor: what was agreed on last, the same on all replicas; `mean` is of own - anchor.
        """

    def state_dict(self) -> StateTree:
        """Return what the rule remembers, the same on all replicas."""

    def load_state_dict(self, state: StateView) -> None:
        """Take back what `state_dict` gave."""


class MeanRule:
    """Replicas take the mean: anchor <- anchor + mean delta."""

    centred = False

    def settle(self, period: int) -> None:
        """Do nothing: a mean is one after however many steps."""

    def agree(self, name: str, current: Tensor, anchor: Tensor, mean: Tensor) -> Tensor:
        """Move the anchor to the mean of the replicas, of its shape."""
        return anchor.add_(mean)

    def state_dict(self) -> StateTree:
        """Return nothing: the anchor is all there is."""
        return {}

    def load_state_dict(self, state: StateView) -> None:
        """Take nothing back."""


def stays(codec: Codec, plan: AveragingPlan, centred: bool) -> bool:
    """Whether what a codec leaves out of a replica's change stays in that replica alone (see `Averaging`)."""
    return codec.biased and not (codec.linear or plan.alpha or centred)


def check_deltas(compression: Compression) -> None:
    """Refuse a codec that gradients can go through, but deltas of parameters cannot.

    Raises:
        UserError: names the nearest that works.
    """
    codec = compression.codec
    if codec.direction:
        raise UserError(
            f"--compression {compression} gives directions of a fixed size, but deltas of parameters have sizes: "
            "use sign (with scales), or --sync allreduce"
        )
    if codec.absorbs_momentum or codec.looks_ahead:
        raise UserError(
            f"--compression {compression} applies momentum to what it encodes, but the optimizer of each replica "
            "applies it before: leave momentum out of the compression, and nesterov with it, or use --sync allreduce"
        )


SHORT_STEPS = 500
"""What replicas miss at the start of a run of fewer steps is not made up for: periods above 4 cost more there."""
FEWEST_PERIODS = 20
"""In a run of fewer, replicas that agree seldom lost over half a point of accuracy."""


def length_notes(plan: AveragingPlan, steps: int) -> list[str]:
    """Say how often replicas agree at first, and whether a run of so many steps has too few periods."""
    notes = []
    if plan.auto:
        return _auto_notes(plan, steps)
    if plan.dense:
        often = "after each step" if plan.dense_period == 1 else f"every {plan.dense_period} steps"
        waits = ", without overlap," if plan.keep_progress else ""
        notes.append(f"replicas agree {often}{waits} in the first {plan.dense} of {steps} (warmup=0: not)")
    periods = (steps - plan.start) // plan.period
    if steps and periods < FEWEST_PERIODS and plan.period > 1:
        better = (steps - plan.start) // FEWEST_PERIODS
        count = "1 period" if periods == 1 else f"{max(0, periods)} periods"
        advice = f"use a period of at most {better}" if better > 1 else "use --sync allreduce"
        notes.append(
            f"{steps} steps are {count} of {plan.period}, and a run of fewer than {FEWEST_PERIODS} may lose accuracy: "
            f"{advice}"
        )
    return notes


def _auto_notes(plan: AveragingPlan, steps: int) -> list[str]:
    """Say within what a period is chosen, and how much shorter it is at first."""
    control = plan.control()
    most = (
        f"at most {control.most} of {steps} steps, for a run is to have {FEWEST_PERIODS} averages"
        if steps
        else "at most"
    )
    if control.most == LONGEST or not steps:
        most = f"at most {control.most} steps"
    notes = [f"the period is chosen as the run goes, {most}; the record and the report have each change"]
    if plan.dense:
        waits = ", without overlap," if plan.keep_progress and plan.overlap else ""
        notes.append(f"replicas agree four times as often{waits} in the first {plan.dense} of {steps} (warmup=0: not)")
    return notes
