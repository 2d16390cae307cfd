"""A worker that trains on leases: it asks the scheduler what to do, and does it, until the run is over."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from echelon.coordinator.addresses import ROLES_FOLDER
from echelon.coordinator.messages import (
    EvaluateTask,
    EvaluationDone,
    JoinWorker,
    SetupDone,
    SetupTask,
    TaskReport,
    TrainTask,
)
from echelon.core.axes import Axis
from echelon.core.errors import UserError
from echelon.models import parameter_count
from echelon.observe.environment import allowed_cores, environment
from echelon.observe.phases import Phase
from echelon.ps.client import PushInfo, RunOver, TagLost
from echelon.ps.messages import BUFFERS_KEY
from echelon.ps.worker_rank import WorkerRank
from echelon.records.events import BadImageSkipped
from echelon.records.file import Recorder
from echelon.records.going import read_launch
from echelon.trainer.assemble import Given, run_notes
from echelon.trainer.compatibility import interplay_notes
from echelon.trainer.evaluate import EvaluationReport
from echelon.trainer.leased_assemble import LeasedWorker, assemble_worker
from echelon.trainer.leased_bench import WorkerModel, build_bench
from echelon.trainer.leased_saving import average_state, flat_averages, flat_values, run_state
from echelon.trainer.leased_split import begin_lease, follow, lead_evaluation, lead_lease
from echelon.trainer.replica import Sums
from echelon.trainer.resolved import ResolvedRun
from echelon.trainer.state import layout_sizes
from echelon.trainer.step import StepResult
from echelon.trainer.team import join_team
from echelon.trainer.window import resident_bytes


def train_leased(run: ResolvedRun, path: Path, seat: WorkerRank, record: Recorder, given: Given) -> str:
    """Be a worker of a run to its end; returns how it ended, which only a worker's first rank knows.

    Raises:
        UserError: something in the description cannot be built.
    """
    with join_team(run, seat, path / ROLES_FOLDER) as world:
        bench = build_bench(run, seat, world, given)
        if seat.leads:
            status = _lead(path, seat, record, bench)
        else:
            assert bench.replica is not None
            follow(bench, bench.replica)
            status = ""
        for file, reason in bench.close():
            record.write(BadImageSkipped(f"{file}: {reason}", file))
    return status


def _lead(path: Path, seat: WorkerRank, record: Recorder, bench: WorkerModel) -> str:
    worker = assemble_worker(path, seat, record, bench)
    if worker.client.join(_join(worker)).set_up:
        _take_buffers(worker)
    status = work(worker)
    if bench.replica is not None:
        bench.replica.words.tell("over")
    worker.saver.finish()
    worker.strategy.close()
    return status


def _join(worker: LeasedWorker) -> JoinWorker:
    about = {"host": socket.gethostname(), "affinity": allowed_cores()}
    return JoinWorker(worker.table.fingerprint, machine=worker.seat.machine, pid=os.getpid(), about=about)


def work(worker: LeasedWorker) -> str:
    """Do tasks until the scheduler says that the run is over; returns how it ended."""
    clock, trained = worker.bench.clock, False
    while (task := worker.client.next_task()) is not None:
        clock.enter(Phase.OTHER)  # unless it trains
        match task:
            case SetupTask():
                worker.client.report(set_up(worker, task))
            case EvaluateTask():
                worker.client.report(evaluate_copy(worker, task))
            case TrainTask():
                if not trained:
                    clock.drain()  # what came before the first lease is no step's time
                trained = True
                with contextlib.suppress(RunOver):  # the next task is none
                    train_task(worker, task)
        clock.enter(Phase.COMMUNICATE)  # until the next task is there
    return worker.client.status


def train_task(worker: LeasedWorker, task: TrainTask) -> None:
    """Forward and backward of a lease; its report leaves once all of its gradients are acknowledged."""
    bench, clock, strategy = worker.bench, worker.bench.clock, worker.strategy
    if bench.replica is not None:
        begin_lease(bench.replica, task)
    batch = bench.part(task)
    worker.schedule.set_step(task.step)
    lr = worker.schedule.lr
    strategy.begin(PushInfo(task.task, task.step, task.share, task.shares, 0, 0, lr))
    result: StepResult | Sums
    if bench.replica is not None:
        result = lead_lease(worker, bench.replica, task, batch)
    else:
        result = bench.step.forward_backward(batch, strategy)
    clock.enter(Phase.UPDATE)
    strategy.step()
    clock.enter(Phase.COMMUNICATE)
    buffers = strategy.flat_buffers()
    if len(buffers):
        worker.client.send_buffers(task.task, buffers)
    report = TaskReport(
        float(result.loss), float(result.score) if bench.task.score_label else None, result.samples, lr,
        clock.drain(), resident_bytes(bench.world.device), strategy.density(), dict(strategy.entropy_coded()),
        worker.sampler.row if worker.sampler.sample() else [],
    )  # fmt: skip
    worker.client.finish_task(task.task, report)


def set_up(worker: LeasedWorker, task: SetupTask) -> SetupDone:
    """Give the servers what they begin with: a checkpoint's state, or the parameters of this worker's new model."""
    strategy, table = worker.strategy, worker.table
    worker.client.wait_for_servers(worker.settings.servers)
    saved = worker.saver.restore()
    below, beyond, best = 0, [], None
    states: dict[int, dict[str, Any]] = {k: {"value": v, "version": 0} for k, v in strategy.key_values().items()}
    if saved is not None:
        part = saved["ps"]
        if part["table"] != table.fingerprint:
            raise UserError("the checkpoint is of other --sync settings: resume with the same servers and chunk_kb")
        below, beyond, best = part["below"], part["beyond"], saved["best"]
        states = dict(part["keys"])
        worker.strategy.held.load_state_dict(saved["model"])
        if len(part["buffers"]):
            states[BUFFERS_KEY] = {"value": part["buffers"], "version": 0}
    _put(worker, states)
    per_epoch = worker.bench.train_loader.batches_per_epoch
    return SetupDone(
        task.task, table.fingerprint, per_epoch, below, beyond, best, saved is not None, _start_info(worker)
    )


def _put(worker: LeasedWorker, states: dict[int, dict[str, Any]]) -> None:
    """Give the servers their keys; one that dies over it gets its own again."""
    deadline_s = worker.bench.run.timeout_s
    ends = time.monotonic() + deadline_s
    while True:
        try:
            worker.client.wait_for_servers(worker.settings.servers)
            worker.client.put(worker.table, states, deadline_s)
            return
        except TagLost:
            if time.monotonic() > ends:
                raise


def _start_info(worker: LeasedWorker) -> dict[str, Any]:
    bench = worker.bench
    info, config = bench.source.info, worker.config
    launch = read_launch(worker.path)
    return {
        **_layout_info(worker), "notes": _notes(worker),
        "device": str(bench.world.device), "threads": torch.get_num_threads(),
        "parameters": parameter_count(worker.strategy.held), "model": config.model.name, "data": info.name,
        "classes": list(info.classes), "task": asdict(bench.task.facts()),
        "train_size": info.train_size, "eval_size": info.eval_size,
        "steps_per_epoch": bench.train_loader.batches_per_epoch,
        "environment": vars(environment(launch.command)), "launched_t": launch.launched_t,
    }  # fmt: skip


def _notes(worker: LeasedWorker) -> list[tuple[str, str]]:
    replica, run = worker.bench.replica, worker.bench.run
    layout = replica.split.notes if replica else ()
    settings = interplay_notes(run, worker.seat.workers)
    return run_notes(run.config, worker.bench.source.info, layout, settings)


def _layout_info(worker: LeasedWorker) -> dict[str, Any]:
    """Say how the workers' models are split."""
    replica, placement = worker.bench.replica, worker.bench.world.placement
    if replica is None or placement is None:
        return {}
    return {
        "layout": layout_sizes(
            replace(placement.layout, sizes={**placement.layout.sizes, Axis.DP: worker.seat.workers})
        )
    }


def _take_buffers(worker: LeasedWorker) -> None:
    """Begin with the others' BatchNorm statistics: this worker joins a run that goes on."""
    own = worker.strategy.flat_buffers()
    if not len(own):
        return
    worker.client.wait_for_servers(worker.settings.servers)
    got = worker.client.fetch(worker.table, [BUFFERS_KEY], 0, full=False)[BUFFERS_KEY]["value"]
    if len(got) == len(own):
        worker.strategy.load_buffers(got)


def evaluate_copy(worker: LeasedWorker, task: EvaluateTask) -> EvaluationDone:
    """Evaluate and save the servers' copy that a task names."""
    strategy, indices = worker.strategy, [k.index for k in worker.table.keys]
    own = strategy.flat_buffers()
    try:
        keys = worker.client.fetch(worker.table, indices, task.tag, full=True)
        buffers = worker.client.fetch(worker.table, [BUFFERS_KEY], task.tag, full=True)[BUFFERS_KEY]["value"]
    except TagLost:
        return EvaluationDone(task.task, lost=True)
    averages = bool(worker.settings.ema)
    strategy.set_parameters(flat_averages(keys) if averages else flat_values(keys))
    if len(buffers) == len(own) and len(own):
        strategy.load_buffers(buffers)
    about: dict[str, Any] = {}
    best, metric = None, None
    if task.evaluate:
        report = _evaluate(worker)
        about = {"loss": report.loss, "metrics": report.metrics, "seconds": report.seconds, "samples": report.samples}
        primary = worker.bench.task.primary
        value = report.metrics[primary.name]
        if value is not None and primary.better(value, task.best):
            best, metric = value, primary.score(value)
            worker.saver.write_detail(task, report)
    if task.reason or metric is not None:
        ema = average_state(strategy.held, keys) if averages else None
        strategy.set_parameters(flat_values(keys))
        state = run_state(strategy.held, worker.table, keys, buffers, ema)
        per_epoch = worker.bench.train_loader.batches_per_epoch
        below = task.step if worker.settings.aggregates else state["ps"]["below"]
        state["ps"]["below"] = below
        cursor = {"epoch": below // per_epoch, "batch": below % per_epoch, "step": task.step}
        newest = task.best if best is None else best
        worker.saver.save(task, {**state, "cursor": cursor, "best": newest}, metric)
    if len(own):
        strategy.load_buffers(own)
    return EvaluationDone(task.task, best=best, about={"step": task.step, **about} if about else {})


def _evaluate(worker: LeasedWorker) -> EvaluationReport:
    bench = worker.bench
    if bench.replica is not None:
        return lead_evaluation(bench, bench.replica)
    return bench.evaluate(worker.strategy.module)
