"""What the user sees while a run goes: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from echelon.core.task import TaskFacts
from echelon.observe.phases import PHASES
from echelon.records.kinds import Steps
from echelon.trainer.evaluate import EvaluationReport


@dataclass(frozen=True)
class RunLength:
    """How long the run is, in optimizer steps and epochs."""

    total_steps: int
    epochs: int


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
            self._progress.update(self._bar, completed=steps.step, epoch=where, numbers=self._numbers(steps))

    def epoch(self, epoch: int, steps: Steps, report: EvaluationReport | None) -> None:
        """Print a line for an epoch's end."""
        result = ""
        if report is not None:
            primary = self.task.primary
            shown = {f"test {primary.title}": report.metrics.get(primary.name)}
            shown |= {metric.title: report.metrics.get(metric.name) for metric in self.task.headlines[:1]}
            result = "".join(f"  {name} {value:.4f}" for name, value in shown.items() if value is not None)
        self.say(f"epoch {epoch + 1}/{self._length.epochs}{result}  {self._numbers(steps)}")

    def _numbers(self, steps: Steps) -> str:
        busy = [sum(row[i] for row in steps.phases) for i in range(len(PHASES))]
        total = sum(busy) or 1.0
        shares = " ".join(
            f"{phase.value} {spent / total:.0%}"
            for phase, spent in zip(PHASES, busy, strict=True)
            if spent / total >= 0.01
        )
        label = self.task.score_label
        score = f"  train {label} {(steps.correct or 0) / max(1, steps.samples):.3f}" if label else ""
        loss = sum(steps.losses) / max(1, steps.count)
        return f"loss {loss:.4f}{score}  {steps.samples_per_s:,.0f} samples/s  [{shares}]"

    def say(self, text: str) -> None:
        """Print a line above the live one."""
        self._progress.console.print(text, markup=False, soft_wrap=True)
