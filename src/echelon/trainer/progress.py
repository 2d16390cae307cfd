"""What is told of a run as it goes: its record, its curves, its line on the terminal."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from echelon.observe.phases import PHASES
from echelon.observe.scalars import Scalars
from echelon.parallel.split import SplitModel
from echelon.records.events import Event, Resumed
from echelon.records.file import Recorder, read_records
from echelon.records.kinds import Evaluation, Pause, PipelineAction, PipelineStep, Resources, Steps
from echelon.trainer.display import Display
from echelon.trainer.evaluate import EvaluationReport
from echelon.trainer.step_watch import PAUSES
from echelon.trainer.window import WindowTotals


@dataclass(frozen=True)
class WindowEnd:
    """Where a window of steps ends: the last step's epoch (from 0) and number (from 1), its learning rate.

    `density`: share of the encoded elements that the last message carried; None without a sparse codec.
    """

    epoch: int
    step: int
    lr: float
    density: float | None


class RunProgress:
    """Tells of a run as it goes; rank 0 does, or the scheduler where workers come and go. In others it is silent."""

    def __init__(self, record: Recorder, scalars: Scalars, display: Display) -> None:
        self.record, self.scalars, self.display = record, scalars, display
        self._last: WindowTotals | None = None

    def note(self, name: str, text: str) -> None:
        """Say what a user has to know of this run before it trains."""
        self.record.write(Event(text, name=name))
        self.display.say(text)

    def resumed(self, step: int, folder: Path) -> None:
        """Say from where a run goes on, and what was trained before and is trained again."""
        reached = max((window.step for window in read_records(folder, Steps)), default=step)
        lost = max(0, reached - step)
        message = f"resumed at step {step}" + (f"; {lost} steps since the checkpoint are trained again" if lost else "")
        self.record.write(Resumed(message, step, lost))

    def window(self, end: WindowEnd, totals: WindowTotals) -> None:
        """Tell of a window of steps of all ranks, or of all workers."""
        self._last = totals
        steps = Steps(
            epoch=end.epoch,
            step=end.step,
            losses=totals.losses,
            correct=round(totals.score) if self.display.task.score_label else None,
            samples=totals.samples,
            lr=end.lr,
            seconds=totals.seconds,
            phase_names=[p.value for p in PHASES],
            phases=totals.phases,
            wire_bytes=totals.wire_bytes,
            wire_bytes_by_group=totals.wire_bytes_by_group,
            other_wire_bytes=totals.other_wire_bytes,
            density=end.density,
            memory_bytes=totals.memory_bytes,
            gc_s=[r.gc_s for r in totals.ranks],
            comm_busy_s=[r.busy_s for r in totals.ranks],
            comm_spread_s=[r.spread_s for r in totals.ranks],
            pause_names=PAUSES,
            pauses=[r.pauses for r in totals.ranks if r.pauses],
            waits=[[round(s, 6) for s in waits] for waits in totals.waits],
        )
        self.record.write(steps)
        if any(totals.resources):
            self.record.write(Resources.of(end.step, totals.resources))
        rate = totals.samples / max(totals.seconds, 1e-9)
        curves = {"train/loss": totals.losses[-1], "train/lr": end.lr, "train/samples_per_s": rate}
        self.scalars.write(end.step, curves)
        self.display.window(end.epoch, end.step, totals)

    def paused(self, name: str, step: int, seconds: float) -> None:
        """Tell how long something between steps took, for the slowest rank."""
        self.record.write(Pause(name, seconds, step))

    def evaluated(self, epoch: int, step: int, report: EvaluationReport) -> None:
        """Tell what an evaluation found."""
        self.record.write(Evaluation(step, epoch, report.loss, report.metrics, report.seconds, report.samples))
        values = {f"test/{name}": value for name, value in report.metrics.items() if value is not None}
        self.scalars.write(step, values)

    def epoch_ended(self, epoch: int, report: EvaluationReport | None) -> None:
        """Print a line for an epoch's end, once there were steps."""
        if self._last is not None:
            self.display.epoch(epoch, self._last, report)


def record_pipeline(record: Recorder, split: SplitModel | None, step: int) -> None:
    """Record what each rank of a pipeline computed when, in the few steps that it took the times of."""
    pipeline = split.pipeline if split else None
    if pipeline is None:
        return
    for actions in pipeline.timelines:
        timed = [PipelineAction(a.rank, a.stage, a.microbatch, a.kind, a.begin_s, a.end_s) for a in actions]
        record.write(PipelineStep(step, timed, pipeline.schedule, pipeline.microbatches))
    pipeline.timelines.clear()
