"""What a run would take on described machines, way by way: time, money, memory; the best three, and what would change.

The run's time is that of its steps, evaluations, checkpoints and start; where machines fail, each failure costs half
the time between checkpoints and another start (Young 1974, to the first order).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from echelon.config import RunConfig
from echelon.config.machines import FLAG, Machines
from echelon.config.validate import CheckpointInterval
from echelon.core.errors import UserError
from echelon.core.link import Link
from echelon.planning.calibration import Calibration
from echelon.planning.layouts import DescribedModel, PlannedWay, candidates, with_memory
from echelon.planning.steps import (
    Division,
    Estimate,
    Pipelined,
    Replicated,
    StepForecast,
    at_division,
    divisions,
    interval,
)
from echelon.records.kinds import Alternative
from echelon.reporting.report.predictions import is_long_enough
from echelon.run.residuals import Residual
from echelon.run.resolve import agreements, checkpoint_interval, longest_period
from echelon.run.way_samples import StudySamples

SHOWN = 3
OTHER_SAMPLES = 0.1
"""By how much the samples to a target may be off, relatively, for each doubling of what a study had."""


@dataclass(frozen=True)
class Length:
    """How long a run is.

    Attributes:
        batch: samples of a global batch.
        epochs: passes over the data.
        checkpoint_every: in steps or in seconds; both None: there are none but the last.
        max_steps: after which it ends, wherever that is; 0: with the last epoch.
    """

    batch: int
    epochs: int
    train_size: int
    evaluations: int
    checkpoint_every: CheckpointInterval
    max_steps: int = 0

    @property
    def steps(self) -> int:
        """Optimizer steps."""
        steps = self.epochs * max(1, -(-self.train_size // self.batch))  # the last batch of an epoch may be smaller
        return min(steps, self.max_steps or steps)

    def of_epochs(self, epochs: float) -> Length:
        """Return the length of a run that ends after so many epochs, a fraction of one counted."""
        whole = max(1, math.ceil(epochs))
        most = max(1, round(epochs * max(1, -(-self.train_size // self.batch))))
        each = self.evaluations / max(1, self.epochs)
        return replace(self, epochs=whole, max_steps=most, evaluations=max(1, round(each * epochs)))

    def checkpoint_every_s(self, step_s: float) -> float:
        """Return the seconds between checkpoints, of steps that take so long; infinite: there are none."""
        every = self.checkpoint_every
        return every.seconds or (every.steps * step_s if every.steps else math.inf)

    @staticmethod
    def of(config: RunConfig, known: Calibration, batch: int = 0, epochs: int = 0) -> Length:
        """Return a run's length, with another batch or other epochs where they are given: then these end it alone."""
        most = 0 if epochs else config.training.max_steps
        epochs = epochs or config.training.epochs
        every, size = checkpoint_interval(config), batch or config.data.batch_size
        whole = replace(Length(size, epochs, known.train_size, 1, every), max_steps=most)
        begun = math.ceil(whole.steps / max(1, -(-known.train_size // size)))  # epochs
        evaluations = max(1, begun // config.training.eval_every) if config.training.eval_every else 1
        return replace(whole, evaluations=evaluations)


@dataclass(frozen=True)
class TargetEstimate:
    """What a way takes to the target of a study.

    Attributes:
        seconds: from the command on; infinite: it is not reached in most seeds. None: `reason` says why nothing is
            known.
        epochs: to the target; `money`: as of a run.
    """

    seconds: Estimate | None = None
    epochs: Estimate | None = None
    money: Estimate | None = None
    reason: str = ""


@dataclass(frozen=True)
class RunEstimate:
    """One way on some machines.

    Attributes:
        run_s: seconds from the command to the end; `money`: of all workers for as long, None where no price is said.
        fits: whether a rank's memory holds it; True where memory was not said or is not known.
        is_long_enough: the run, for what such a way costs in accuracy was measured in runs as long.
        division: how workers divide the `batch` samples of a step.
        to_target: what the run takes to a study's target; None: there is no study.
    """

    candidate: PlannedWay
    machines: Machines
    step: StepForecast
    run_s: Estimate
    money: Estimate | None
    fits: bool
    is_long_enough: bool = True
    division: Division = Division.ALIKE
    batch: int = 0
    to_target: TargetEstimate | None = None

    @property
    def label(self) -> str:
        """How one writes the way."""
        return self.candidate.way.label


@dataclass(frozen=True)
class Change:
    """What the answer becomes when something else is given."""

    what: str
    best: RunEstimate
    before: RunEstimate

    @property
    def same(self) -> bool:
        """Whether the best way stays."""
        return self.best.label == self.before.label


@dataclass(frozen=True)
class PlannedMachines:
    """The answer for one description of machines, and what it follows from: predictions, those that fit first."""

    known: Calibration
    machines: Machines
    predictions: tuple[RunEstimate, ...]
    changes: tuple[Change, ...]

    @property
    def best(self) -> list[RunEstimate]:
        """The fastest that fit."""
        return [p for p in self.predictions if p.fits and p.is_long_enough][:SHOWN]

    @property
    def too_short(self) -> list[RunEstimate]:
        """Those that would be faster than the best, and that the run is too short for."""
        shortest_s = min((p.run_s.value for p in self.best), default=0.0)
        return [p for p in self.predictions if p.fits and not p.is_long_enough and p.run_s.value < shortest_s]

    @property
    def best_to_target(self) -> RunEstimate | None:
        """The fastest to a study's target that fits; None: the study measured none."""
        known = [
            (p.to_target.seconds.value, p) for p in self.predictions if p.fits and p.to_target and p.to_target.seconds
        ]
        reaching = [(seconds, p) for seconds, p in known if math.isfinite(seconds)]
        return min(reaching, key=lambda each: each[0])[1] if reaching else None

    @property
    def best_exact(self) -> RunEstimate | None:
        """The fastest that fits and trains like one process."""
        return next((p for p in self.predictions if p.fits and p.candidate.exact), None)


@dataclass(frozen=True)
class PlanReport:
    """All answers, and what they follow from; `residuals` are those of earlier predictions in the same folder."""

    known: Calibration
    length: Length
    answers: tuple[PlannedMachines, ...]
    samples: StudySamples | None = None
    residuals: tuple[Residual, ...] = ()

    @property
    def source(self) -> str:
        """What it follows from, in words: runs, or the rates of several devices."""
        return "; ".join(dict.fromkeys(answer.known.source for answer in self.answers))


def make_plan(
    known: Calibration, length: Length, machines: Sequence[Machines], described: DescribedModel | None
) -> PlanReport:
    """Predict every way on each of some machines.

    Args:
        described: model and data, for memory and other layouts; None: of a run from Python objects.

    Raises:
        UserError: there are more workers than samples in a batch.
    """
    answers = []
    known = replace(known, ways=tuple(over_steps(way, length.steps) for way in known.ways))
    for each in machines:
        if each.workers > length.batch:
            raise UserError(
                f"{FLAG} {each.name}: a batch of {length.batch} cannot be divided by {each.workers} workers: "
                "give a larger --batch-size"
            )
        found = candidates(known, each, described, length.batch)
        predictions = _sorted(predict(known, length, each, candidate) for candidate in found)
        answers.append(PlannedMachines(known, each, predictions, _changes(known, length, each, predictions, described)))
    return PlanReport(known, length, tuple(answers))


def over_steps(way: Alternative, steps: int) -> Alternative:
    """Return a way as often as a run of so many steps sends it: periods are shorter at its start."""
    sync = way.settings.get("strategy.sync")
    if sync and way.follows:
        return replace(way, period=longest_period(sync, steps))
    return replace(way, share=min(steps, agreements(sync, steps)) / steps) if sync and way.period > 1 else way


def with_targets(plan: PlanReport, samples: StudySamples | None) -> PlanReport:
    """Return a plan with what each way takes to a study's target; None: there is no study."""
    if samples is None:
        return plan
    answers = tuple(
        replace(
            answer,
            predictions=tuple(
                replace(p, to_target=to_target(answer.known, plan.length, p, samples)) for p in answer.predictions
            ),
        )
        for answer in plan.answers
    )
    return replace(plan, answers=answers, samples=samples)


def to_target(known: Calibration, length: Length, way: RunEstimate, samples: StudySamples) -> TargetEstimate:
    """Return what a way takes to a study's target: its samples there, at the predicted pace here.

    The interval holds that of the samples and that of the time; it widens with each doubling of workers (of ways that
    do not train like one process) and of the batch, away from the study's.
    """
    measured = samples.of(way.candidate.settings)
    if measured is None:
        return TargetEstimate(reason="not in the study")
    if 2 * measured.reached < measured.seeds:
        never = Estimate(math.inf, math.inf, math.inf)
        return TargetEstimate(never, never, None, f"reached in {measured.reached} of {measured.seeds} seeds")
    epochs = samples.epochs * measured.ratio
    run = predict(known, length.of_epochs(epochs), way.machines, way.candidate)
    doubled = 0.0 if way.candidate.exact else abs(math.log2(way.machines.workers / samples.workers))
    far = OTHER_SAMPLES * math.hypot(doubled, math.log2(length.batch / samples.batch))
    bounds = measured.low, measured.high, samples.low, samples.high
    off = math.inf
    if all(bound is not None for bound in bounds):
        ratio_off = _off(Estimate(measured.ratio, measured.low or 0.0, measured.high or math.inf))
        epochs_off = _off(Estimate(samples.epochs, samples.low or 0.0, samples.high or math.inf))
        off = math.hypot(ratio_off, epochs_off, far)
    seconds = interval(run.run_s.value, math.hypot(off, _off(run.run_s)))
    missed = f"reached in {measured.reached} of {measured.seeds} seeds" if measured.reached < measured.seeds else ""
    return TargetEstimate(seconds, interval(epochs, off), _cost(seconds, way.machines), missed)


def _off(estimate: Estimate) -> float:
    """Return how far a value may be off in ratio, beyond 1."""
    if not math.isfinite(estimate.value) or estimate.value <= 0:
        return 0.0
    below = estimate.value / estimate.low if estimate.low > 0 else math.inf
    return max(estimate.high / estimate.value, below) - 1


def _sorted(predictions: Iterable[RunEstimate]) -> tuple[RunEstimate, ...]:
    return tuple(sorted(predictions, key=lambda p: (not p.fits, p.run_s.value)))


def predict(known: Calibration, length: Length, machines: Machines, candidate: PlannedWay) -> RunEstimate:
    """Predict a run of one way; on workers of unlike speeds, with the division of a batch that fits and is fastest."""
    found = [
        _predict_divided(known, length, machines, candidate, division)
        for division in divisions(known, machines, length.batch, candidate.way)
    ]
    return min(found, key=lambda each: (not each.fits, each.run_s.value))


def _predict_divided(
    known: Calibration, length: Length, machines: Machines, candidate: PlannedWay, division: Division
) -> RunEstimate:
    divided = at_division(machines, division)
    step = candidate.way.step(known, divided, length.batch)
    scale = known.workers / machines.workers / divided.busy_speed
    pauses_s = known.start_s + length.evaluations * known.evaluation_s * scale
    steps_s, paused = step.seconds.times(length.steps), interval(pauses_s, known.residual)
    run_s = Estimate(steps_s.value + paused.value, steps_s.low + paused.low, steps_s.high + paused.high)
    every_s = length.checkpoint_every_s(step.seconds.value)
    run_s = run_s.times(1 + known.checkpoint_s / every_s).times(_failures(known, every_s, machines))
    needed = candidate.by_part(machines, division)
    fits = all(n <= g.usable_bytes for n, g in zip(needed, machines.parts, strict=False))
    way = candidate.way
    enough = not isinstance(way, Replicated) or is_long_enough(length.steps, way.cost)
    return RunEstimate(candidate, machines, step, run_s, _cost(run_s, machines), fits, enough, division, length.batch)


def _cost(seconds: Estimate, machines: Machines) -> Estimate | None:
    """Return what all workers cost for so long; None: no price is said."""
    return None if machines.price_per_hour is None else seconds.times(machines.price_per_hour / 3600)


def _failures(known: Calibration, every_s: float, machines: Machines) -> float:
    """Return by how much failures lengthen a run with checkpoints every so many seconds."""
    if math.isinf(machines.mtbf_s):
        return 1.0
    lost = machines.count / machines.mtbf_s * ((every_s / 2 if math.isfinite(every_s) else 0.0) + known.start_s)
    return 1 / (1 - lost) if lost < 1 else math.inf


def _changes(
    known: Calibration,
    length: Length,
    machines: Machines,
    predictions: Sequence[RunEstimate],
    described: DescribedModel | None,
) -> tuple[Change, ...]:
    """Ask again with a faster link, a larger batch, more workers: of the ways that fit, with that batch too."""
    fitting = [p for p in predictions if p.fits and p.is_long_enough]
    if not fitting:
        return ()
    asked: list[tuple[str, Machines, Length]] = []
    larger = replace(length, batch=2 * length.batch)
    room = _fastest_that_fits(known, larger, machines, fitting, described)
    if machines.link is not None and machines.count > 1:
        twice = Link(2 * machines.link.rate_bits_per_s, machines.link.delay_s)
        asked.append(("a link twice as fast", replace(machines, link=twice), length))
    if room:
        asked.append(("twice the batch", machines, larger))
    asked.append(("workers twice as fast", machines.times_as_fast(2), length))
    if machines.price_per_hour:
        half = replace(machines, price_per_hour=machines.price_per_hour / 2)
        asked.append(("half the price", half, length))
    return tuple(
        Change(what, _best(known, of, at, room if of is larger else fitting), fitting[0]) for what, at, of in asked
    )


def _fastest_that_fits(
    known: Calibration,
    length: Length,
    machines: Machines,
    ways: Sequence[RunEstimate],
    described: DescribedModel | None,
) -> list[RunEstimate]:
    """Return the fastest of some ways that fits with a larger batch; a forecast of memory takes seconds, so the
    fastest come first and none behind it.
    """
    if math.isinf(machines.memory_bytes) or described is None:
        return list(ways)
    found = [predict(known, length, machines, p.candidate) for p in ways]
    for each in sorted(found, key=lambda p: (not p.is_long_enough, p.run_s.value)):
        if not described.beyond and _fits_surely(known, length, machines, each.candidate, before=ways[0].batch):
            return [each]
        with suppress(UserError):  # it cannot be laid out with that batch
            candidate = with_memory(each.candidate, known, machines, described, length.batch)
            if (fits := predict(known, length, machines, candidate)).fits:
                return [fits]
    return []


def _fits_surely(known: Calibration, length: Length, machines: Machines, candidate: PlannedWay, before: int) -> bool:
    """Whether a way fits a larger batch by its memory `before`: what grows with samples does so in proportion."""
    if candidate.memory_bytes is None or isinstance(candidate.way, Pipelined):
        return False
    factor = (length.batch // machines.workers) / (before // machines.workers)
    most = math.ceil(factor * candidate.memory_bytes)
    groups = tuple(max(most, math.ceil(factor * each)) for each in candidate.by_group)
    return predict(known, length, machines, replace(candidate, memory_bytes=most, by_group=groups)).fits


def _best(known: Calibration, length: Length, machines: Machines, ways: Sequence[RunEstimate]) -> RunEstimate:
    found = [predict(known, length, machines, p.candidate) for p in ways]
    return min([p for p in found if p.is_long_enough] or found, key=lambda p: p.run_s.value)
