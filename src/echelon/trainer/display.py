"""What the user sees while a run goes: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import dataclass, field
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from echelon.core.task import TaskFacts
from echelon.observe.phases import PHASES, Phase, phase_share
from echelon.records.kinds import Steps
from echelon.trainer.evaluate import EvaluationReport

_NAMES = {Phase.COMMUNICATE: "communication"}


@dataclass(frozen=True)
class RunLength:
    """How long the run is, in optimizer steps and epochs."""

    total_steps: int
    epochs: int


@dataclass
class EpochTotals:
    """What the windows of an epoch add up to.

    Attributes:
        loss_sum: of its steps.
        seconds: of its steps, pauses left out.
        phases: seconds by name, the mean over the ranks.
    """

    steps: int = 0
    samples: int = 0
    correct: float | None = None
    loss_sum: float = 0.0
    seconds: float = 0.0
    phases: Counter[str] = field(default_factory=Counter)

    def add(self, window: Steps) -> None:
        """Add a window's steps."""
        self.steps += window.count
        self.samples += window.samples
        self.loss_sum += window.mean_loss * window.count
        self.seconds += window.seconds
        self.phases.update(window.mean_phases())
        if window.correct is not None:
            self.correct = (self.correct or 0.0) + window.correct


class Display:
    """Progress on rank 0; silent elsewhere."""

    def __init__(self, length: RunLength, task: TaskFacts, visible: bool, done_steps: int = 0) -> None:
        self._length, self.task = length, task
        self._console = Console(quiet=not visible, highlight=False, file=sys.stdout)
        self._live = visible and self._console.is_terminal
        columns = (
            TextColumn("epoch {task.fields[epoch]}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:3.0f}%"),
            TextColumn("{task.fields[numbers]}"),
            TextColumn("ETA"),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=self._console, transient=True)
        total = length.total_steps
        self._bar = self._progress.add_task("", total=total, completed=done_steps, epoch="-", numbers="")

    def __enter__(self) -> Display:
        if self._live:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._progress.stop()

    def window(self, steps: Steps) -> None:
        """Show where the run is."""
        if self._live:
            where = f"{steps.epoch + 1}/{self._length.epochs}"
            window = EpochTotals()
            window.add(steps)
            self._progress.update(self._bar, completed=steps.step, epoch=where, numbers=self._numbers(window))

    def epoch(self, epoch: int, totals: EpochTotals, report: EvaluationReport | None) -> None:
        """Print a line for an epoch's end: what its evaluation found, and means over all of its steps."""
        result = ""
        if report is not None:
            primary = self.task.primary
            shown = {f"test {primary.title}": report.metrics.get(primary.name)}
            shown |= {metric.title: report.metrics.get(metric.name) for metric in self.task.headlines[:1]}
            shown |= {"test loss": report.loss} if primary.name != "loss" else {}
            result = "".join(f"  {name} {value:.4f}" for name, value in shown.items() if value is not None)
        self.say(f"epoch {epoch + 1}/{self._length.epochs}{result}  {self._numbers(totals)}")

    def _numbers(self, totals: EpochTotals) -> str:
        """Write the means over some steps; shares are of their time, the mean over the ranks."""
        shares = {phase: phase_share(totals.phases[phase.value], totals.seconds) for phase in PHASES}
        shown = " ".join(
            f"{_NAMES.get(phase, phase.value)} {share:.0%}" for phase, share in shares.items() if share >= 0.01
        )
        label = self.task.score_label
        score = f"  train {label} {(totals.correct or 0) / max(1, totals.samples):.3f}" if label else ""
        speed = totals.samples / max(totals.seconds, 1e-9)
        loss = totals.loss_sum / max(1, totals.steps)
        return f"train loss {loss:.4f}{score}  {speed:,.0f} samples/s  [of step time: {shown}]"

    def say(self, text: str) -> None:
        """Print a line above the live one."""
        self._progress.console.print(text, markup=False, soft_wrap=True)
