"""A worker that trains on leases: it asks the scheduler what to do, and does it, until the run is over."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch

from echelon.config import RunConfig, load_run_config
from echelon.config.validate import check_world
from echelon.core.errors import USER_ERROR_EXIT_CODE, UserError
from echelon.core.units import parse_seconds
from echelon.data import LoaderConfig, Shard, Source, open_data
from echelon.data.loader import EvalLoader, TrainLoader
from echelon.models import parameter_count
from echelon.observe.environment import environment
from echelon.observe.live.resources import Sampler
from echelon.observe.phases import Phase, PhaseClock, make_clock
from echelon.observe.record import Recorder
from echelon.sync.ps import ParameterServer, WorkerOptions
from echelon.sync.server.client import Client, ClientConfig, PushInfo, RunOver, TagLost
from echelon.sync.server.giving import BUFFERS_KEY
from echelon.sync.server.identity import derive_keys, read_secret
from echelon.sync.server.settings import Settings
from echelon.sync.server.spans import model_table
from echelon.sync.server.table import Cut, Table
from echelon.train.assemble import Given, _rank_seed, _step_settings
from echelon.train.combine import settle_momentum
from echelon.train.evaluate import EvaluationReport, evaluate
from echelon.train.folder import read_launch
from echelon.train.leased_check import settings_of
from echelon.train.leased_saving import LeasedSaver, average_state, flat_averages, flat_values, run_state
from echelon.train.losses import build_loss
from echelon.train.optim import Schedule, build_optimizer, build_schedule
from echelon.train.parts import build_whole
from echelon.train.served_start import ROLES_FOLDER, Seat, note_status, wait_for_address
from echelon.train.state import fingerprint, seed_everything
from echelon.train.step import Step
from echelon.train.window import gpu_uuid, resident_bytes
from echelon.train.worker import _leave, _log_to, _one_line
from echelon.train.world import World, _device

BY_ELEMENT = ("sgd", "nesterov", "momentum", "adam", "adamw", "nadam", "nadamw", "lion", "rmsprop", "adagrad")
"""Optimizers that treat every element by itself, so that a large tensor may be split over servers."""


@dataclass
class LeasedWorker:
    """The parts of one worker."""

    config: RunConfig
    settings: Settings
    world: World
    source: Source
    strategy: ParameterServer
    table: Table
    client: Client
    step: Step
    schedule: Schedule
    clock: PhaseClock
    train_loader: TrainLoader
    eval_loader: EvalLoader
    saver: LeasedSaver
    path: Path
    sampler: Sampler
    sent_bytes: int = 0


def run_leased(folder: str, seat: Seat, given: Given | None = None) -> None:
    """Be a worker of the run that a folder describes, to its end.

    A user's mistake is written to the record and ends the process with exit code 2; any other error with 1.
    """
    path, name = Path(folder), f"worker{seat.number}"
    record = Recorder(path)
    try:
        _log_to(path / "logs" / f"{name}.log")
        status = _train(path, seat, record, given.unshared() if given else Given())
    except UserError as error:
        record.event("refused", str(error), role=name)
        _leave(USER_ERROR_EXIT_CODE)
    except Exception as error:
        logging.exception("this worker failed")
        record.event("rank_failed", _one_line(error), rank=seat.number, pid=os.getpid())
        _leave(1)
    record.close()
    if seat.machine:
        note_status(path / ROLES_FOLDER, status)
    if status == "refused":
        _leave_refused()


def _leave_refused() -> NoReturn:
    sys.exit(USER_ERROR_EXIT_CODE)


def _train(path: Path, seat: Seat, record: Recorder, given: Given) -> str:
    worker = assemble_worker(path, seat, record, given)
    welcome = worker.client.join({**_join_info(worker), "machine": seat.machine})
    if welcome["set_up"]:
        _take_buffers(worker)
    status = work(worker)
    worker.saver.finish()
    worker.train_loader.close()
    worker.eval_loader.close()
    for file, reason in worker.train_loader.bad_images + worker.eval_loader.bad_images:
        record.event("bad_image", f"{file}: {reason}", path=file)
    worker.strategy.close()
    return status


def assemble_worker(path: Path, seat: Seat, record: Recorder, given: Given) -> LeasedWorker:
    """Build the parts of a worker from the run's description.

    Raises:
        UserError: something in the description cannot be built.
    """
    config = settle_momentum(load_run_config(path / "config.yaml"))
    settings = settings_of(config)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    number = seat.number
    world = World(number, 1, seat.local, _device(config.training.device, seat.local), None)
    workers = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    check_world(config, workers)
    seed_everything(config.training.seed)
    source = given.source or open_data(config.data, config.training.seed)
    if source.info.train_size < workers:
        raise UserError(
            f"{source.info.name} has {source.info.train_size} samples for {workers} workers: use fewer workers"
        )
    model = build_whole(config, source.info, world, given.model)
    loader_config = LoaderConfig.of(config.data, config.training.seed, world.device)
    train_loader = TrainLoader(source, loader_config, Shard(0, 1))
    client = Client(_client_config(config, settings, path, number))
    table = model_table(model, _cut(config, settings, client))
    client.set_table(table)
    clock = make_clock(world.device.type)
    options = WorkerOptions(settings, config.optimizer.clip_norm, clock, config.model.compile)
    strategy = ParameterServer(model, table, client, options)
    optimizer = build_optimizer(model, config.optimizer, config.data.batch_size)  # never steps: it carries the schedule
    loss = build_loss(config.optimizer, source.info.class_counts)
    scaler = torch.amp.GradScaler(world.device.type, enabled=False)
    worker = LeasedWorker(
        config, settings, world, source, strategy, table, client,
        Step(loss, _step_settings(config, world.device), clock, scaler),
        build_schedule(optimizer, config.optimizer, train_loader.batches_per_epoch, config.training.epochs), clock,
        train_loader, EvalLoader(source, loader_config, Shard(0, 1)),
        LeasedSaver(path, config.checkpoint.keep, record, fingerprint(config, source.info)), path,
        Sampler(gpu_uuid(world.device)),
    )  # fmt: skip
    seed_everything(_rank_seed(config.training.seed, number))
    return worker


def _client_config(config: RunConfig, settings: Settings, path: Path, number: int) -> ClientConfig:
    roles = path / ROLES_FOLDER
    timeout_s = parse_seconds(config.launch.timeout)
    return ClientConfig(
        f"worker{number}", derive_keys(read_secret(roles)), wait_for_address(roles, timeout_s),
        config.strategy.compression, config.training.seed, number, timeout_s, keeps=settings.replicas == 0,
        aggregates=settings.aggregates,
    )  # fmt: skip


def _cut(config: RunConfig, settings: Settings, client: Client) -> Cut:
    by_element = config.optimizer.name.lower() in BY_ELEMENT and not client.sends_shapes
    return Cut(settings.servers, settings.chunk_bytes, whole_tensors=not by_element)


def _join_info(worker: LeasedWorker) -> dict[str, Any]:
    return {"fingerprint": worker.table.fingerprint, "host": socket.gethostname(), "pid": os.getpid()}


def work(worker: LeasedWorker) -> str:
    """Do tasks until the scheduler says that the run is over; returns how it ended."""
    clock, trained = worker.clock, False
    while (task := worker.client.next_task()) is not None:
        clock.enter(Phase.OTHER)  # unless it trains
        match task["kind"]:
            case "setup":
                worker.client.result(task["task"], set_up(worker))
            case "review":
                worker.client.result(task["task"], review(worker, task))
            case _:
                if not trained:
                    clock.drain()  # what came before the first lease is no step's time
                trained = True
                with contextlib.suppress(RunOver):  # the next task is none
                    train_task(worker, task)
        clock.enter(Phase.COMMUNICATE)  # until the next task is there
    return worker.client.status


def train_task(worker: LeasedWorker, task: dict[str, Any]) -> None:
    """Forward and backward of a lease; its report leaves once all of its gradients are acknowledged."""
    clock, strategy = worker.clock, worker.strategy
    clock.enter(Phase.DATA)
    batch = worker.train_loader.part(task["epoch"], task["batch"], Shard(task["share"], task["shares"]))
    worker.schedule.set_step(task["step"])
    lr = worker.schedule.lr
    strategy.begin(PushInfo(task["task"], task["step"], task["share"], task["shares"], 0, 0, lr))
    result = worker.step.forward_backward(batch, strategy)
    clock.enter(Phase.UPDATE)
    strategy.step()
    clock.enter(Phase.COMMUNICATE)
    buffers = strategy.flat_buffers()
    if len(buffers):
        worker.client.send_buffers(task["task"], buffers)
    sent = worker.client.sent_bytes()
    info = {
        "loss": float(result.loss), "correct": int(result.correct), "samples": result.samples, "lr": lr,
        "phases": clock.drain(), "memory_bytes": resident_bytes(worker.world.device),
        "sent_bytes": sent - worker.sent_bytes,
        "resources": worker.sampler.row if worker.sampler.sample() else [],
    }  # fmt: skip
    worker.sent_bytes = sent
    worker.client.finish_task(task["task"], info)


def set_up(worker: LeasedWorker) -> dict[str, Any]:
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
    return {**_start_info(worker), "fingerprint": table.fingerprint, "done_below": below, "done_beyond": beyond,
            "best": best, "resumed": saved is not None}  # fmt: skip


def _put(worker: LeasedWorker, states: dict[int, dict[str, Any]]) -> None:
    """Give the servers their keys; one that dies over it gets its own again."""
    deadline_s = parse_seconds(worker.config.launch.timeout)
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
    info, config = worker.source.info, worker.config
    launch = read_launch(worker.path)
    return {
        "device": str(worker.world.device), "threads": torch.get_num_threads(),
        "parameters": parameter_count(worker.strategy.held), "model": config.model.name, "data": info.name,
        "classes": list(info.classes), "train_size": info.train_size, "eval_size": info.eval_size,
        "steps_per_epoch": worker.train_loader.batches_per_epoch,
        "environment": {**environment(), "command": launch["command"]}, "launched_t": launch["launched_t"],
    }  # fmt: skip


def _take_buffers(worker: LeasedWorker) -> None:
    """Begin with the others' BatchNorm statistics: this worker joins a run that goes on."""
    own = worker.strategy.flat_buffers()
    if not len(own):
        return
    worker.client.wait_for_servers(worker.settings.servers)
    got = worker.client.fetch(worker.table, [BUFFERS_KEY], 0, full=False)[BUFFERS_KEY]["value"]
    if len(got) == len(own):
        worker.strategy.load_buffers(got)


def review(worker: LeasedWorker, task: dict[str, Any]) -> dict[str, Any]:
    """Evaluate and save the servers' copy that a task names."""
    strategy, indices = worker.strategy, [k.index for k in worker.table.keys]
    own = strategy.flat_buffers()
    try:
        keys = worker.client.fetch(worker.table, indices, task["tag"], full=True)
        buffers = worker.client.fetch(worker.table, [BUFFERS_KEY], task["tag"], full=True)[BUFFERS_KEY]["value"]
    except TagLost:
        return {"lost": True}
    averages = bool(worker.settings.ema)
    strategy.set_parameters(flat_averages(keys) if averages else flat_values(keys))
    if len(buffers) == len(own) and len(own):
        strategy.load_buffers(buffers)
    info: dict[str, Any] = {"step": task["step"], "reason": task["reason"]}
    metric = None
    if task["evaluate"]:
        report = _evaluate(worker)
        info |= {"loss": report.loss, "metrics": report.metrics, "seconds": report.seconds, "samples": report.samples}
        top1 = report.metrics["top1"]
        if top1 is not None and (task["best"] is None or top1 > task["best"]):
            metric = info["best"] = top1
            worker.saver.write_detail(task, report)
    if task["reason"] or metric is not None:
        ema = average_state(strategy.held, keys) if averages else None
        strategy.set_parameters(flat_values(keys))
        state = run_state(strategy.held, worker.table, keys, buffers, ema)
        per_epoch = worker.train_loader.batches_per_epoch
        below = task["step"] if worker.settings.aggregates else state["ps"]["below"]
        state["ps"]["below"] = below
        cursor = {"epoch": below // per_epoch, "batch": below % per_epoch, "step": task["step"]}
        best = task["best"] if metric is None else metric
        worker.saver.save(task, {**state, "cursor": cursor, "best": best}, metric)
    if len(own):
        strategy.load_buffers(own)
    return info


def _evaluate(worker: LeasedWorker) -> EvaluationReport:
    loss = build_loss(worker.config.optimizer, worker.source.info.class_counts)
    model = worker.strategy.module
    return evaluate(model, worker.eval_loader, loss, worker.world, worker.source.info.classes)
