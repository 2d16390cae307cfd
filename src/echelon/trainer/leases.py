"""Batches that a coordinator gives out: each worker asks for the next one, and steps without waiting for the others.

Between its steps a worker does what else the coordinator asks for: it gives the servers what they begin with, and
evaluates and saves their copies. Where a worker is split, its first rank talks to coordinator and servers; the others
take part in what it does (`Commands`).
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace

from echelon.coordinator.messages import (
    LAST_REASONS,
    UNFREEZE,
    CopyResult,
    EvaluateTask,
    EvaluationDone,
    JoinWorker,
    SetupDone,
    SetupTask,
    TaskReport,
    TrainTask,
)
from echelon.core.task import BestResult
from echelon.data.base import Shard
from echelon.observe.environment import allowed_cores
from echelon.observe.garbage import GarbageClock
from echelon.observe.phases import PAUSES, RECORDING, Phase
from echelon.observe.resources import Sampler
from echelon.ps.client import PushInfo, TagLost
from echelon.ps.commands import Command
from echelon.ps.copies import ServersCopy
from echelon.ps.messages import BUFFERS_KEY
from echelon.ps.split_worker import SplitWorker
from echelon.records.kinds import Start
from echelon.tasks import nest
from echelon.tasks.base import SAMPLE, Batch, PendingSection
from echelon.trainer.evaluate import EvaluationReport
from echelon.trainer.loop import TrainingRun, evaluate_agreed
from echelon.trainer.progress import record_pipeline
from echelon.trainer.retuning import begin_anew
from echelon.trainer.server_parts import ServerLink
from echelon.trainer.servers_checkpoint import ServersState
from echelon.trainer.slow_steps import SlowSteps
from echelon.trainer.state import Cursor
from echelon.trainer.step import StepResult
from echelon.trainer.step_watch import StepWatch
from echelon.trainer.window import gpu_uuid, peak_bytes


def batch_part(run: TrainingRun, lease: TrainTask | Command) -> Batch:
    """Return this rank's part of a lease: the ranks of a worker that divide samples divide it."""
    run.clock.enter(Phase.DATA)
    shard = Shard(lease.share * run.world.data_size + run.world.data_rank, lease.shares * run.world.data_size)
    batch = run.train_loader.part(lease.epoch, lease.batch, shard)
    if run.task.unit != SAMPLE and lease.shares > 1 and batch.global_units is None:
        complete = run.train_loader.part(lease.epoch, lease.batch, Shard(0, 1))  # nobody else can tell its units
        batch.global_units = run.task.units(complete.targets)
    if isinstance(run.parts.sync, SplitWorker):
        run.parts.sync.begin(nest.rows(batch.targets))
    return batch


class Leases:
    """Leases of batches, as a worker's leading rank takes them until the run is over."""

    def __init__(
        self, run: TrainingRun, link: ServerLink, state: ServersState, start: Start, notes: Sequence[tuple[str, str]]
    ) -> None:
        """Take the parts of a run, the link to its servers, and their state.

        Args:
            start: what the record says of the start, with this worker's processes alone; its scheduler knows the rest.
            notes: what a user has to know of this run, each with the name of its event.
        """
        self.status = ""
        self._run, self._link, self._state, self._start, self._notes = run, link, state, start, notes
        self._split = run.parts.sync if isinstance(run.parts.sync, SplitWorker) else None
        self._sampler = Sampler(gpu_uuid(run.world.device))
        self._garbage = GarbageClock(thaws=False)
        self._watch = StepWatch(run.clock, self._garbage)
        self._slow = SlowSteps(run.progress.record)

    def __iter__(self) -> Iterator[Batch]:
        """Do what the coordinator asks for, and give the batches of leases, until it says that the run is over."""
        client, clock, trained = self._link.client, self._run.clock, False
        with self._garbage:
            if client.join(self._joining()).set_up:
                self._take_buffers()
            while (task := client.next_task()) is not None:
                clock.enter(Phase.OTHER)  # unless it trains
                match task:
                    case SetupTask():
                        client.report(self._set_up(task))
                    case EvaluateTask():
                        client.report(self._evaluate(task))
                        client.invalidate()
                    case TrainTask():
                        if not trained:  # what came before the first lease is no step's time
                            clock.drain()
                        trained = True
                        yield self._begin(task)
                clock.enter(Phase.COMMUNICATE)  # until the next task is there
        self.status = client.status
        if self._split is not None:
            self._split.channel.tell(Command("over"))

    def step_done(self, result: StepResult) -> None:
        """Report a lease; the report leaves once all of its gradients are acknowledged."""
        run, link, task = self._run, self._link, self._task
        run.clock.enter(Phase.COMMUNICATE)
        buffers = link.servers.flat_buffers()
        if len(buffers):
            link.client.send_buffers(task.task, buffers)
        loss, score, samples = _sums(result, self._split)
        if run.step.guard is not None:
            run.step.guard.settle()
        self._watch.end_step()
        if run.profiler is not None and run.profiler.step_done():
            self._watch.paused(RECORDING, switch_profiler(run))
        phases = run.clock.drain()
        (after,), facts = self._watch.pauses, self._watch.close(phases, None)
        report = TaskReport(
            loss, score if run.task.score_label else None, round(samples), run.schedule.lr,
            phases, peak_bytes(run.world.device),
            link.servers.density(), dict(link.servers.entropy_coded()),
            self._sampler.row if self._sampler.sample() else [], facts.gc_s,
            {name: seconds for name, seconds in zip(PAUSES, facts.pauses, strict=True) if seconds},
            (samples if run.task.unit == SAMPLE else result.units) / max(1, result.global_units),
        )  # fmt: skip
        link.client.finish_task(task.task, report)
        self._slow.look_alone(task.step + 1, link.process.number, facts.slowest, after, self._watch)
        if link.process.number == 0:
            record_pipeline(run.progress.record, run.parts.split, task.step)

    def _joining(self) -> JoinWorker:
        link = self._link
        return JoinWorker(
            self._state.fingerprint(), [], link.process.machine, os.getpid(), socket.gethostname(), allowed_cores(),
            list(self._start.pids),
        )  # fmt: skip

    def _begin(self, task: TrainTask) -> Batch:
        run = self._run
        self._task = task
        if self._split is not None:
            self._split.channel.tell(Command("train", task.epoch, task.batch, task.share, task.shares))
        run.world.notes.at_step(task.step + 1)
        batch = batch_part(run, task)
        run.schedule.set_step(task.step)
        push = PushInfo(task.task, task.step, task.share, task.shares, 0, 0, run.schedule.lr)
        self._link.servers.begin(push)
        return batch

    def _set_up(self, task: SetupTask) -> SetupDone:
        """Give the servers what they begin with: a checkpoint's state, or the parameters of a new model."""
        link, run = self._link, self._run
        link.client.wait_for_servers(link.settings.servers)
        resumed = run.saver.restore() is not None
        self._put()
        about = {name: value for name, value in asdict(self._start).items() if name != "t"}  # it is not written yet
        best, best_loss = BestResult.numbers(run.saver.best)
        return SetupDone(
            task.task, self._state.fingerprint(), run.train_loader.batches_per_epoch, self._state.below,
            self._state.beyond, best, best_loss, resumed, about,
            self._said(), run.saver.passed_over, run.saver.stagnation, parts=self._state.parts,
        )  # fmt: skip

    def _said(self) -> list[list[str]]:
        """Return what a user has to know of this run, and of what is trained since this launch."""
        state, per_epoch = self._state, self._run.train_loader.batches_per_epoch
        epoch = state.below // state.parts // per_epoch
        anew = {"tuning"} if state.begins_anew else set()
        return [[name, begin_anew(epoch, note) if name in anew else note] for name, note in self._notes]

    def _put(self) -> None:
        """Give the servers their keys; one that dies over it gets its own again."""
        link = self._link
        ends = time.monotonic() + link.timeout_s
        while True:
            try:
                link.client.wait_for_servers(link.settings.servers)
                link.client.put(link.table, self._state.keys(), link.timeout_s)
                for key, rows in self._state.rows():
                    link.client.put_rows(key, rows, link.timeout_s)
                return
            except TagLost:
                if time.monotonic() > ends:
                    raise

    def _take_buffers(self) -> None:
        """Begin with the others' BatchNorm statistics: this worker joins a run that goes on."""
        link = self._link
        buffers = link.servers.flat_buffers()
        if not len(buffers):
            return
        link.client.wait_for_servers(link.settings.servers)
        fetched = link.client.fetch(link.table, [BUFFERS_KEY], 0, full=False)[BUFFERS_KEY]["value"]
        if len(fetched) == len(buffers):
            link.servers.load_buffers(fetched)

    def _evaluate(self, task: EvaluateTask) -> EvaluationDone:
        """Evaluate and save the servers' copy that a task names: a pause of this worker between its steps."""
        self._run.clock.enter(None)
        name, began = "evaluation" if task.evaluate else "checkpoint", time.perf_counter()
        self._run.world.notes.enter(name)
        try:
            done = self._evaluate_copy(task)
        except TagLost:
            done = EvaluationDone(task.task, lost=True)
        seconds = time.perf_counter() - began
        self._watch.paused(name, seconds)
        self._run.progress.paused(name, task.step, seconds)
        return done

    def _evaluate_copy(self, task: EvaluateTask) -> EvaluationDone:
        link, saver = self._link, self._run.saver
        copy = link.servers.copy = ServersCopy(*link.client.fetch_copy(link.table, task.tag, link.folder), task.tag)
        cursor = self._cursor(task, copy)
        saver.best = BestResult.of(task.best, task.best_loss)
        last = task.reason in LAST_REASONS  # this launch is over after it
        self._state.takes_over = task.takes_over
        saver.stagnation = task.stagnation
        done = EvaluationDone(task.task, stagnation=task.stagnation)
        if task.evaluate:
            report = evaluate_agreed(self._run)
            if self._split is not None:
                report = replace(report, collect=_with_others(self._split, report.collect))
            result = _copy_result(report, task.step)
            if task.counts:
                saver.count_evaluation(report, self._run.task, self._run.settings.early_stop_delta)
            is_best = saver.consider_best(cursor, report, self._run.task, last)
            best, best_loss = BestResult.numbers(saver.best if is_best else None)
            done = EvaluationDone(
                task.task, best=best, best_loss=best_loss, evaluation=result, stagnation=saver.stagnation
            )
        if task.reason:
            saver.save(cursor, task.reason, last=last)
        if last:
            saver.finish()
        link.servers.copy = None
        return done

    def _cursor(self, task: EvaluateTask, copy: ServersCopy) -> Cursor:
        per_epoch = self._run.train_loader.batches_per_epoch
        whole = self._link.settings.aggregates or task.reason == UNFREEZE  # all before it is done
        below = task.step if whole else copy.counted()[0] // self._state.parts
        return Cursor(below // per_epoch, below % per_epoch, task.step)


class Commands:
    """A split worker's other ranks: their parts of the leases that the first one takes, as it says."""

    def __init__(self, run: TrainingRun, worker: SplitWorker) -> None:
        self.status = ""
        self._run, self._worker = run, worker

    def __iter__(self) -> Iterator[Batch]:
        """Give batches, and evaluate with the others, until the first rank says that the run is over."""
        report: EvaluationReport | None = None
        while (command := self._worker.channel.hear()).kind != "over":
            match command.kind:
                case "train":
                    yield batch_part(self._run, command)
                case "evaluate":
                    report = evaluate_agreed(self._run)
                case "collect" if report is not None:
                    pending = report.collect()
                    if pending is not None:
                        pending.result()  # that it has left
                case kind:
                    raise RuntimeError(f"the first rank said {kind!r}")

    def step_done(self, result: StepResult) -> None:
        """Add up with the first rank what the step gave."""
        _sums(result, self._worker)
        if self._run.profiler is not None and self._run.profiler.step_done():
            switch_profiler(self._run)
        self._run.clock.drain()


def _with_others(
    worker: SplitWorker, collect: Callable[[], PendingSection | None]
) -> Callable[[], PendingSection | None]:
    """Return what brings samples together with the worker's other ranks, which hear of it then."""

    def together() -> PendingSection | None:
        """Tell the others, and do this rank's part."""
        worker.channel.tell(Command("collect"))
        return collect()

    return together


def _copy_result(report: EvaluationReport, step: int) -> CopyResult:
    """Return what the scheduler is told of an evaluation."""
    result = CopyResult(report.loss, dict(report.metrics), report.seconds, report.samples, step)
    if (test := report.test) is None:
        return result
    return replace(
        result,
        test_loss=test.loss,
        test_metrics=dict(test.metrics),
        test_samples=test.samples,
        test_seconds=test.seconds,
    )


def switch_profiler(run: TrainingRun) -> float:
    """Begin or end the profile, in no phase of a step; returns the seconds that this took."""
    assert run.profiler is not None
    began = time.perf_counter()
    run.clock.enter(None)
    run.profiler.switch()
    run.clock.enter(Phase.OTHER)
    return time.perf_counter() - began


def _sums(result: StepResult, worker: SplitWorker | None) -> list[float]:
    """Return loss, score and samples of a worker; its ranks call it together."""
    numbers = [float(result.loss), float(result.score), float(result.samples)]
    return numbers if worker is None else worker.summed(numbers)
