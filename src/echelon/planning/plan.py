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
from echelon.planning.steps import Estimate, Replicated, StepForecast, interval
from echelon.records.kinds import Alternative
from echelon.reporting.report.predictions import is_long_enough
from echelon.run.resolve import agreements, checkpoint_interval, longest_period

SHOWN = 3
_USED_SHARE = 0.9  # of a device's memory: a forecast is no measurement


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
class RunEstimate:
    """One way on some machines.

    Attributes:
        run_s: seconds from the command to the end; `money`: of all workers for as long, 0 where no price is said.
        fits: whether a rank's memory holds it; True where memory was not said or is not known.
        is_long_enough: the run, for what such a way costs in accuracy was measured in runs as long.
    """

    candidate: PlannedWay
    machines: Machines
    step: StepForecast
    run_s: Estimate
    money: Estimate
    fits: bool
    is_long_enough: bool = True

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
    def best_exact(self) -> RunEstimate | None:
        """The fastest that fits and trains like one process."""
        return next((p for p in self.predictions if p.fits and p.candidate.exact), None)


@dataclass(frozen=True)
class PlanReport:
    """All answers, and what they follow from."""

    known: Calibration
    length: Length
    answers: tuple[PlannedMachines, ...]

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


def _sorted(predictions: Iterable[RunEstimate]) -> tuple[RunEstimate, ...]:
    return tuple(sorted(predictions, key=lambda p: (not p.fits, p.run_s.value)))


def predict(known: Calibration, length: Length, machines: Machines, candidate: PlannedWay) -> RunEstimate:
    """Predict a run of one way."""
    step = candidate.way.step(known, machines, length.batch)
    scale = known.workers / machines.workers / machines.pace
    pauses_s = known.start_s + length.evaluations * known.evaluation_s * scale
    steps_s, paused = step.seconds.times(length.steps), interval(pauses_s, known.residual)
    run_s = Estimate(steps_s.value + paused.value, steps_s.low + paused.low, steps_s.high + paused.high)
    every_s = length.checkpoint_every_s(step.seconds.value)
    run_s = run_s.times(1 + known.checkpoint_s / every_s).times(_failures(known, every_s, machines))
    memory = candidate.memory_bytes
    fits = memory is None or memory <= _USED_SHARE * machines.memory_bytes
    way = candidate.way
    enough = not isinstance(way, Replicated) or is_long_enough(length.steps, way.cost)
    return RunEstimate(candidate, machines, step, run_s, run_s.times(machines.price_per_hour / 3600), fits, enough)


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
    asked.append(("workers twice as fast", replace(machines, speed=2 * machines.speed), length))
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
        with suppress(UserError):  # it cannot be laid out with that batch
            candidate = with_memory(each.candidate, machines, described, length.batch)
            if (fits := predict(known, length, machines, candidate)).fits:
                return [fits]
    return []


def _best(known: Calibration, length: Length, machines: Machines, ways: Sequence[RunEstimate]) -> RunEstimate:
    found = [predict(known, length, machines, p.candidate) for p in ways]
    return min([p for p in found if p.is_long_enough] or found, key=lambda p: p.run_s.value)
