"""The training loop: reads like the papers, on one page."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

from torch import Tensor

from echelon.config.validate import CheckpointInterval
from echelon.data.loader import EvalLoader, TrainLoader
from echelon.observe.garbage import GarbageClock
from echelon.observe.phases import PHASES, Phase, PhaseClock
from echelon.observe.scalars import Scalars
from echelon.optim.build import Schedule
from echelon.parallel.split import SplitModel
from echelon.records import kinds
from echelon.records.file import Recorder
from echelon.trainer.display import Display
from echelon.trainer.evaluate import EvaluationReport, evaluate
from echelon.trainer.saving import Saver
from echelon.trainer.slow_steps import SlowSteps
from echelon.trainer.state import Cursor, RunParts
from echelon.trainer.step import Step
from echelon.trainer.step_watch import PAUSES, RECORDING
from echelon.trainer.stop import StopFlag
from echelon.trainer.window import Sent, Traffic, Window, WindowTotals
from echelon.trainer.world import World


@dataclass(frozen=True)
class LoopSettings:
    """How long to train, and when to evaluate and save."""

    epochs: int
    max_steps: int
    eval_every: int
    checkpoint: CheckpointInterval


@dataclass
class TrainingRun:
    """The parts of a run, put together by `worker.py` or by a loop of one's own."""

    world: World
    parts: RunParts
    step: Step
    loss: Callable[[Tensor, Tensor], Tensor]
    schedule: Schedule
    train_loader: TrainLoader
    eval_loader: EvalLoader
    classes: tuple[str, ...]
    clock: PhaseClock
    saver: Saver
    record: Recorder
    scalars: Scalars
    display: Display
    settings: LoopSettings
    traffic: Traffic = field(default_factory=Traffic)


def fit(run: TrainingRun, cursor: Cursor, stop: StopFlag) -> str:
    """Train from a cursor to the end; returns `completed` or `stopped`."""
    with GarbageClock() as garbage:
        return fit_in(run, cursor, stop, Window(run.world, run.clock, garbage))


def fit_in(run: TrainingRun, cursor: Cursor, stop: StopFlag, window: Window) -> str:
    """Train as `fit` does, in windows of steps that the caller may pause."""
    slow = SlowSteps(run.record)
    totals: WindowTotals | None = None
    due, saved_s = False, time.monotonic()
    while cursor.epoch < run.settings.epochs and not _reached(run, cursor):
        run.clock.enter(Phase.DATA)
        for batch in run.train_loader.epoch(cursor.epoch, cursor.batch):
            run.schedule.set_step(cursor.step)
            window.add(run.step.forward_backward(batch, run.parts.sync))
            run.clock.enter(Phase.UPDATE)
            run.parts.sync.step()
            if run.parts.ema:
                run.parts.ema.update(run.parts.held)
            run.clock.enter(Phase.OTHER)
            window.end_step()
            cursor.step, cursor.batch = cursor.step + 1, cursor.batch + 1
            due = _steps_due(run, cursor)
            epoch_ends = cursor.batch == run.train_loader.batches_per_epoch or _reached(run, cursor)
            if window.full or due or epoch_ends:
                totals = _close_window(run, window, cursor, stop, saved_s)
                slow.look(cursor.step - len(totals.losses) + 1, totals.ranks, window.watch, totals.pauses)
                window.go_on()
                if totals.stop:
                    _save(run, window, cursor, "stop")
                    return "stopped"
                due = due or totals.checkpoint_due
                if due and not epoch_ends:
                    _save(run, window, cursor, "interval")
                    saved_s = time.monotonic()
            if _reached(run, cursor):
                break
            run.clock.enter(Phase.DATA)
        _end_epoch(run, window, cursor, totals)
        if due:  # at an epoch's end the checkpoint comes after the evaluation
            _save(run, window, cursor, "interval")
            saved_s = time.monotonic()
    _save(run, window, cursor, "end")
    return "completed"


def _save(run: TrainingRun, window: Window, cursor: Cursor, reason: str) -> None:
    with _pause(run, window, cursor, "checkpoint"):
        run.saver.save(cursor, reason=reason)


@contextmanager
def _pause(run: TrainingRun, window: Window, cursor: Cursor, name: str) -> Iterator[None]:
    """Record how long something between steps took, for the slowest rank."""
    with window.pause(name) as pause:
        yield
        window.meet()
    run.record.write(kinds.Pause(name, pause.seconds, cursor.step))


def _reached(run: TrainingRun, cursor: Cursor) -> bool:
    return 0 < run.settings.max_steps <= cursor.step


def _steps_due(run: TrainingRun, cursor: Cursor) -> bool:
    every = run.settings.checkpoint.steps
    return every is not None and cursor.step % every == 0


def _close_window(run: TrainingRun, window: Window, cursor: Cursor, stop: StopFlag, saved_s: float) -> WindowTotals:
    every_s = run.settings.checkpoint.seconds
    due = every_s is not None and time.monotonic() - saved_s >= every_s
    sent, others = run.traffic.since_last(run.parts.sync.bytes_sent(), run.saver.bytes_sent)
    totals = window.close(Sent(sent, others), run.parts.sync.reduce_times(), bool(stop), due)
    steps = kinds.Steps(
        epoch=cursor.epoch,
        step=cursor.step,
        losses=totals.losses,
        correct=totals.correct,
        samples=totals.samples,
        lr=run.schedule.lr,
        seconds=totals.seconds,
        phase_names=[p.value for p in PHASES],
        phases=totals.phases,
        wire_bytes=totals.wire_bytes,
        wire_bytes_by_group=totals.wire_bytes_by_group,
        other_wire_bytes=totals.other_wire_bytes,
        density=run.parts.sync.density(),
        memory_bytes=totals.memory_bytes,
        gc_s=[r.gc_s for r in totals.ranks],
        comm_busy_s=[r.busy_s for r in totals.ranks],
        comm_spread_s=[r.spread_s for r in totals.ranks],
        pause_names=PAUSES,
        pauses=[r.pauses for r in totals.ranks],
        waits=[[round(s, 6) for s in waits] for waits in totals.waits],
    )
    run.record.write(steps)
    if totals.resources:
        run.record.write(kinds.Resources.of(cursor.step, totals.resources))
    record_pipeline(run.record, run.parts.split, cursor.step)
    rate = totals.samples / max(totals.seconds, 1e-9)
    curves = {"train/loss": totals.losses[-1], "train/lr": run.schedule.lr, "train/samples_per_s": rate}
    run.scalars.write(cursor.step, curves)
    run.display.window(cursor.epoch, cursor.step, totals)
    return totals


def record_pipeline(record: Recorder, split: SplitModel | None, step: int) -> None:
    """Record what each rank of a pipeline computed when, in the few steps that it took the times of."""
    pipeline = split.pipeline if split else None
    if pipeline is None:
        return
    for actions in pipeline.timelines:
        timed = [kinds.PipelineAction(a.rank, a.stage, a.microbatch, a.kind, a.begin_s, a.end_s) for a in actions]
        record.write(kinds.PipelineStep(step, timed, pipeline.schedule, pipeline.microbatches))
    pipeline.timelines.clear()


def _end_epoch(run: TrainingRun, window: Window, cursor: Cursor, totals: WindowTotals | None) -> None:
    """Evaluate where it is due, keep the best, and move the cursor to the next epoch."""
    whole = cursor.batch >= run.train_loader.batches_per_epoch
    last = _reached(run, cursor) or cursor.epoch + 1 >= run.settings.epochs
    every = run.settings.eval_every
    report = None
    if last or (whole and every and (cursor.epoch + 1) % every == 0):
        with _pause(run, window, cursor, "evaluation"):
            report = run_evaluation(run, cursor)
    coded = run.parts.sync.entropy_coded()
    if coded:
        run.record.write(kinds.EntropyCoding(cursor.step, **coded))
    epoch = cursor.epoch
    if whole:
        cursor.epoch, cursor.batch = cursor.epoch + 1, 0
    if report is not None:
        with _pause(run, window, cursor, "checkpoint"):
            run.saver.consider_best(cursor, report)
    if totals is not None:
        with window.pause(RECORDING):
            run.display.epoch(epoch, totals, report)
            window.meet()


def run_evaluation(run: TrainingRun, cursor: Cursor) -> EvaluationReport:
    """Evaluate the present model (its moving average, where there is one) and record the result."""
    averaged: AbstractContextManager[object] = run.parts.ema.swapped(run.parts.held) if run.parts.ema else nullcontext()
    with averaged, run.parts.sync.agreed(averages=run.parts.ema is not None):
        report = evaluate(run.parts.model, run.eval_loader, run.loss, run.world, run.classes)
        if run.parts.split:
            run.parts.split.settle()
    run.record.write(
        kinds.Evaluation(cursor.step, cursor.epoch, report.loss, report.metrics, report.seconds, report.samples)
    )
    run.scalars.write(
        cursor.step, {f"test/{name}": value for name, value in report.metrics.items() if value is not None}
    )
    return report
