"""What the user sees while a run goes: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field

from echelon.config import RunConfig
from echelon.core.rate_search import STEPS, rate_of
from echelon.core.task import TaskFacts
from echelon.core.units import format_metric
from echelon.observe.phases import PHASES, Phase, phase_share
from echelon.observe.screen import Bar, Screen
from echelon.records.kinds import Steps
from echelon.trainer.evaluate import EvaluationReport

_NAMES = {Phase.COMMUNICATE: "communication"}


@dataclass(frozen=True)
class RunLength:
    """How long the run is, in optimizer steps and epochs; `epochs` is 0 where it searches a learning rate.

    Attributes:
        steps_per_epoch: 0: not known.
    """

    total_steps: int
    epochs: int
    steps_per_epoch: int = 0

    @classmethod
    def of(cls, config: RunConfig, total_steps: int, steps_per_epoch: int = 0) -> RunLength:
        """Return what is shown of a run of so many steps; a search is ended from outside, long before."""
        return cls(STEPS, 0) if config.optimizer.lr_find else cls(total_steps, config.training.epochs, steps_per_epoch)


@dataclass
class EpochTotals:
    """What the windows of an epoch add up to.

    Attributes:
        loss_sum: of its steps.
        seconds: of its steps, pauses left out.
        phases: seconds by name, the mean over the ranks.
    """

    steps: int = 0
    finite_steps: int = 0
    samples: int = 0
    correct: float | None = None
    loss_sum: float = 0.0
    seconds: float = 0.0
    phases: Counter[str] = field(default_factory=Counter)

    def add(self, window: Steps) -> None:
        """Add a window's steps."""
        self.steps += window.count
        self.samples += window.samples
        finite = [loss for loss in window.losses if math.isfinite(loss)]  # others are told, or left out of training
        self.finite_steps, self.loss_sum = self.finite_steps + len(finite), self.loss_sum + math.fsum(finite)
        self.seconds += window.seconds
        self.phases.update(window.mean_phases())
        if window.correct is not None:
            self.correct = (self.correct or 0.0) + window.correct


class Display(Screen):
    """Progress on rank 0; silent elsewhere."""

    def __init__(self, length: RunLength, task: TaskFacts, visible: bool, done_steps: int = 0) -> None:
        super().__init__(visible)
        self._length, self.task = length, task
        self._steps = Bar("steps", length.total_steps, done=done_steps)

    def __enter__(self) -> Display:
        """Show the steps from now on."""
        self._bars.insert(0, self._steps)
        super().__enter__()
        return self

    def window(self, steps: Steps) -> None:
        """Show where the run is."""
        window = EpochTotals()
        window.add(steps)
        self._steps.name = f"epoch {steps.epoch + 1}/{self._length.epochs}, step"
        if not self._length.epochs:
            self._steps.name = f"search at learning rate {rate_of(min(steps.step, STEPS) - 1):.1e}, step"
        self._steps.done, self._steps.text = min(steps.step, self._length.total_steps), self._numbers(window)

    def epoch(self, epoch: int, totals: EpochTotals, report: EvaluationReport | None) -> None:
        """Print a line for an epoch's end: what its evaluation found, and means over all of its steps.

        Of a search, whose losses rise and fall with the rate, a mean says nothing.
        """
        if not self._length.epochs:
            return
        result = ""
        if report is not None:
            primary = self.task.primary
            shown = {f"evaluation {primary.title}": report.metrics.get(primary.name)}
            shown |= {metric.title: report.metrics.get(metric.name) for metric in self.task.headlines[:1]}
            shown |= {"evaluation loss": report.loss} if primary.name != "loss" else {}
            if report.test is not None:
                shown |= {f"test {primary.title}": report.test.metrics.get(primary.name)}
            result = "".join(f"  {name} {format_metric(value)}" for name, value in shown.items() if value is not None)
        numbers = self._numbers(totals) if totals.steps else "[its steps were done before; only its evaluation was not]"
        if 0 < totals.steps < self._length.steps_per_epoch:  # the others came before a resume, or do not come
            numbers += f" ({totals.steps} of {self._length.steps_per_epoch} steps)"
        self.say(f"epoch {epoch + 1}/{self._length.epochs}{result}  {numbers}")

    def _numbers(self, totals: EpochTotals) -> str:
        """Write the means over some steps; shares are of their time, the mean over the ranks."""
        shown = " ".join(f"{name} {percent}%" for name, percent in _percents(totals).items())
        label = self.task.score_label
        score = f"  train {label} {(totals.correct or 0) / max(1, totals.samples):.3f}" if label else ""
        unit, speed = self.task.speed(totals.samples / max(totals.seconds, 1e-9))
        loss = totals.loss_sum / totals.finite_steps if totals.finite_steps else math.nan
        return f"train loss {format_metric(loss)}{score}  {speed:,.0f} {unit}  [of step time: {shown}]"


def _percents(totals: EpochTotals) -> dict[str, int]:
    """Return the percentages of step time by phase; together 100.

    `other` has what takes less than 1%, and what no phase has, such as a server's worker that waits for a lease.
    """
    seconds = max(totals.seconds, sum(totals.phases.values()))  # batches of servers' workers began in windows before
    shares = {phase: phase_share(totals.phases[phase.value], seconds) for phase in PHASES}
    told = {phase: share for phase, share in shares.items() if share >= 0.01 and phase != Phase.OTHER}
    rest = max(0.0, 1 - sum(told.values()))
    named = {_NAMES.get(phase, phase.value): share for phase, share in told.items()} | {Phase.OTHER.value: rest}
    whole = {name: int(100 * share) for name, share in named.items()}
    by_remainder = sorted(named, key=lambda name: whole[name] - 100 * named[name])
    for name in by_remainder[: 100 - sum(whole.values())]:
        whole[name] += 1
    return {name: percent for name, percent in whole.items() if percent}
