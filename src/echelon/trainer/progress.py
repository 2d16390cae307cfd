"""What is told of a run as it goes: its record, its line on the terminal, loggers and callbacks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice, takewhile
from pathlib import Path

from echelon.compression.base import Codec
from echelon.config import RunConfig
from echelon.config.build import leaf_values
from echelon.core.task import BEFORE_TASKS
from echelon.core.units import many
from echelon.observe.callbacks import CheckpointInfo, EndInfo, EvaluationInfo, Listeners, RunInfo, WindowInfo
from echelon.parallel.split import SplitModel
from echelon.records.events import Event, Resumed
from echelon.records.file import Recorder, newest
from echelon.records.kinds import Checkpoint, Evaluation, Pause, PipelineStep, Resources, Start, Steps
from echelon.trainer.display import Display, EpochTotals
from echelon.trainer.evaluate import EvaluationReport

_SCALED_WEIGHTS = 2  # `records.kinds.VERSION`


class RunProgress:
    """Tells of a run as it goes; rank 0 does, or the scheduler where workers come and go. In others it is silent."""

    def __init__(self, record: Recorder, listeners: Listeners, display: Display) -> None:
        self.record, self.listeners, self.display = record, listeners, display
        self._epochs: dict[int, EpochTotals] = {}

    def note(self, name: str, text: str) -> None:
        """Say what a user has to know of this run before it trains."""
        self.happened(Event(text, name=name))

    def happened(self, event: Event) -> None:
        """Say what happened between two steps."""
        self.record.write(event)
        self.display.say(event.message)

    def begins(self, start: Start, config: RunConfig, folder: Path, codec: Codec) -> None:
        """Tell of a run's start: what is trained on what, as far as only those know who have built it."""
        before = next(newest(folder, Start), None) if start.start_step else None
        self.record.write(start)
        task = "" if start.task.name == BEFORE_TASKS.name else start.task.name.replace("_", " ")
        numbers = [task] if task else []
        numbers += [f"{start.parameters:,} parameters"] if start.parameters is not None else []
        numbers += [f"{start.train_size:,} training samples"] if start.train_size is not None else []
        numbers += [f"{start.eval_size:,} to evaluate"] if start.eval_size is not None else []
        numbers += [f"{many(start.steps_per_epoch, 'step')} an epoch"]
        layout = " x ".join(f"{axis}={size}" for axis, size in (start.layout or {}).items() if size > 1)
        self.display.say(f"{start.model} on {start.data}: {', '.join([*numbers, *([layout] if layout else [])])}")
        if before is not None and (changed := other_numerics(before, start)):
            self.note("numerics", f"{changed}: sums may differ in their last bits from those of an undisturbed run")
        if before is not None and (changed := other_losses(before, config)):
            self.note("losses", changed)
        if before is not None and (changed := codec.changed_since(before.version)):
            self.note("codec", f"this run began with an earlier version; from here on {changed}")
        self.listeners.tell(run_info(start, config, folder))
        self.listeners.deliver()

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
        score = None if steps.correct is None else steps.correct / max(1, steps.samples)
        self.listeners.tell(WindowInfo(steps.step, steps.epoch, steps.losses, steps.lr, steps.samples_per_s, score))
        self.display.window(steps)

    def paused(self, name: str, step: int, seconds: float) -> None:
        """Tell how long something between steps took, for the slowest rank."""
        self.record.write(Pause(name, seconds, step))

    def evaluated(self, epoch: int, step: int, report: EvaluationReport) -> None:
        """Tell what an evaluation found."""
        test = report.test
        evaluation = Evaluation(step, epoch, report.loss, report.metrics, report.seconds, report.samples)
        if test is not None:
            seconds = report.seconds + test.seconds
            evaluation = replace(
                evaluation, seconds=seconds, test_loss=test.loss, test_metrics=test.metrics, test_samples=test.samples
            )
        self.record.write(evaluation)
        self.listeners.tell(EvaluationInfo(step, epoch, report.loss, report.metrics, report.seconds, report.samples))

    def saved(self, saved: Checkpoint) -> None:
        """Tell of a checkpoint that is on the disk, and recorded; any thread may call it."""
        self.listeners.tell(CheckpointInfo(saved.step, Path(saved.path), saved.reason, saved.n_bytes, saved.total_s))

    def broke_off(self) -> None:
        """Let loggers end a run that failed in this process, which goes on."""
        for logger in self.listeners.loggers:
            logger.on_end(EndInfo("failed"))

    def ended(self, status: str) -> None:
        """Tell that the run is over, and what is left to tell.

        Raises:
            CallbackFailed: a callback raised.
        """
        self.listeners.tell(EndInfo(status))
        self.listeners.deliver()

    def epoch_ended(self, epoch: int, report: EvaluationReport | None) -> None:
        """Print a line for an epoch's end, where it had steps or an evaluation since this process began."""
        totals = self._epochs.get(epoch)
        if totals is not None or report is not None:
            self.display.epoch(epoch, totals or EpochTotals(), report)
        self._epochs = {later: totals for later, totals in self._epochs.items() if later > epoch}


def run_info(start: Start, config: RunConfig, folder: Path) -> RunInfo:
    """Return what listeners are told of a run that begins."""
    task = start.task
    counts_primary = task.score_label == task.primary.title
    score = (task.primary.name if counts_primary else "score") if task.score_label else ""
    return RunInfo(
        folder, leaf_values(config), task.primary, score, start.epochs, start.steps_per_epoch, start.parameters,
        start.world_size, start.start_step,
    )  # fmt: skip


def record_pipeline(record: Recorder, split: SplitModel | None, step: int) -> None:
    """Record what each rank of a pipeline computed when, in the few steps that it took the times of."""
    pipeline = split.pipeline if split else None
    if pipeline is None:
        return
    for actions in pipeline.timelines:
        record.write(PipelineStep(step, actions, pipeline.schedule, pipeline.microbatches))
    pipeline.timelines.clear()


def other_losses(before: Start, config: RunConfig) -> str:
    """Say how losses differ from those of a start by an earlier version; empty: they do not."""
    weights, smoothing = config.optimizer.class_weights, config.optimizer.label_smoothing
    if before.version >= _SCALED_WEIGHTS or (weights in ("none", "") and not smoothing):
        return ""
    changes = ["evaluations tell the loss without class weights and label smoothing"]
    if weights not in ("none", "", "balanced"):
        changes.append(
            f"--class-weights {weights} are scaled to a mean of 1 over the training samples, which changes the "
            "gradient as another --lr would"
        )
    return f"this run began with an earlier version; from here on {', and '.join(changes)}"


def other_numerics(before: Start, now: Start) -> str:
    """Say what has changed between two starts of a run that may change the last bits of sums; empty: nothing.

    >>> other_numerics(Start(threads=1, device="cpu"), Start(threads=2, device="cpu"))
    'computes on 2 threads per worker (1 before)'
    """
    pairs = (
        ("on {}", now.device.partition(":")[0], before.device.partition(":")[0]),
        ("on {} threads per worker", now.threads, before.threads),
        ("on {}", now.environment.cpu, before.environment.cpu),
        ("with torch {}", now.environment.torch, before.environment.torch),
    )
    changes = [f"{how.format(new)} ({old} before)" for how, new, old in pairs if new and old and new != old]
    return f"computes {', '.join(changes)}" if changes else ""
