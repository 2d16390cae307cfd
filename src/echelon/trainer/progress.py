"""What is told of a run as it goes: its record, its curves, its line on the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice, takewhile
from pathlib import Path

from echelon.observe.scalars import Scalars
from echelon.parallel.split import SplitModel
from echelon.records.events import Event, Resumed
from echelon.records.file import Recorder, newest
from echelon.records.kinds import Evaluation, Pause, PipelineStep, Resources, Start, Steps
from echelon.trainer.display import Display, EpochTotals
from echelon.trainer.evaluate import EvaluationReport


class RunProgress:
    """Tells of a run as it goes; rank 0 does, or the scheduler where workers come and go. In others it is silent."""

    def __init__(self, record: Recorder, scalars: Scalars, display: Display) -> None:
        self.record, self.scalars, self.display = record, scalars, display
        self._epochs: dict[int, EpochTotals] = {}

    def note(self, name: str, text: str) -> None:
        """Say what a user has to know of this run before it trains."""
        self.record.write(Event(text, name=name))
        self.display.say(text)

    def resumed(self, step: int, folder: Path) -> None:
        """Say from where a run goes on, and what was trained before and is trained again."""
        beyond = takewhile(lambda window: window.step > step, newest(folder, Steps))
        lost = max((window.step for window in beyond), default=step) - step
        message = f"resumed at step {step}" + (f"; {lost} steps since the checkpoint are trained again" if lost else "")
        self.record.write(Resumed(message, step, lost))

    def restored(self, step: int | None, folder: Path, passed_over: Sequence[str]) -> None:
        """Say how a start goes on from what came before; nothing of a run's first start.

        Args:
            step: of the checkpoint that was restored; None: there is none.
            passed_over: what is wrong with newer checkpoints.
        """
        for message in passed_over:
            self.display.say(message)
        if step is not None:
            self.resumed(step, folder)
        elif len(list(islice(newest(folder, Start), 2))) > 1:
            self.note("from_start", "no checkpoint was saved so far: training starts from its beginning")

    def window(self, steps: Steps, resources: Sequence[Sequence[float]]) -> None:
        """Tell of a window of steps of all ranks, or of all workers.

        Args:
            resources: a row for each of them, in the order of `RESOURCE_NAMES`; empty where nothing new was sampled.
        """
        if not self.display.task.score_label:
            steps = replace(steps, correct=None)
        self._epochs.setdefault(steps.epoch, EpochTotals()).add(steps)
        self.record.write(steps)
        if any(resources):
            self.record.write(Resources.of(steps.step, resources))
        curves = {"train/loss": steps.losses[-1], "train/samples_per_s": steps.samples_per_s}
        self.scalars.write(steps.step, curves | ({"train/lr": steps.lr} if steps.lr is not None else {}))
        self.display.window(steps)

    def paused(self, name: str, step: int, seconds: float) -> None:
        """Tell how long something between steps took, for the slowest rank."""
        self.record.write(Pause(name, seconds, step))

    def evaluated(self, epoch: int, step: int, report: EvaluationReport) -> None:
        """Tell what an evaluation found."""
        self.record.write(Evaluation(step, epoch, report.loss, report.metrics, report.seconds, report.samples))
        values = {f"test/{name}": value for name, value in report.metrics.items() if value is not None}
        self.scalars.write(step, values)

    def epoch_ended(self, epoch: int, report: EvaluationReport | None) -> None:
        """Print a line for an epoch's end, where it had steps since this process began."""
        if (totals := self._epochs.get(epoch)) is not None:
            self.display.epoch(epoch, totals, report)
        self._epochs = {later: totals for later, totals in self._epochs.items() if later > epoch}


def record_pipeline(record: Recorder, split: SplitModel | None, step: int) -> None:
    """Record what each rank of a pipeline computed when, in the few steps that it took the times of."""
    pipeline = split.pipeline if split else None
    if pipeline is None:
        return
    for actions in pipeline.timelines:
        record.write(PipelineStep(step, actions, pipeline.schedule, pipeline.microbatches))
    pipeline.timelines.clear()
