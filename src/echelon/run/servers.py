"""Scheduler and server processes of a run: from its folder to its end."""

from __future__ import annotations

import json
import logging
import math
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import torch
from torch import nn

from echelon.config import load_run_config
from echelon.coordinator.addresses import ADDRESS_FILE, ROLES_FOLDER, STATUS_FILE, role_address, wait_for_address
from echelon.coordinator.config import CONTINUES, CoordinatorConfig, TrainingPlan
from echelon.coordinator.messages import EvaluationDone, JoinWorker, SetupDone
from echelon.coordinator.runs import whole_steps
from echelon.coordinator.scheduler import Callbacks, Scheduler, SchedulerConfig
from echelon.core.errors import USER_ERROR_EXIT_CODE, UserError
from echelon.core.files import write_atomic
from echelon.core.task import BEFORE_TASKS
from echelon.core.units import format_seconds
from echelon.messages.identity import derive_keys, read_secret
from echelon.observe.callbacks import CallbackFailed, Listeners
from echelon.observe.notes import SERVING, open_notes
from echelon.optim.build import build_optimizer
from echelon.optim.kernels import HAVE_FUSED, fuse
from echelon.optim.traits import dense_name
from echelon.ps.keystore import MakeOptimizer
from echelon.ps.server import Server, ServerConfig
from echelon.ps.serving import coordination_policy
from echelon.records.decode import decode
from echelon.records.events import CallbackError, Refusal, RoleFailed
from echelon.records.file import Recorder, newest
from echelon.records.going import read_launch
from echelon.records.kinds import Checkpoint, End, Start, Steps
from echelon.run.ending import why_ended
from echelon.run.machine import say
from echelon.run.parcel import Parcel
from echelon.run.rate_search import as_ended
from echelon.run.resolve import resolve
from echelon.sync.ps import server_settings
from echelon.tasks.base import EvaluationResult
from echelon.torch_compat import spare_dynamo
from echelon.trainer.assemble import UserObjects, build_listeners
from echelon.trainer.display import Display, RunLength
from echelon.trainer.evaluate import EvaluationReport
from echelon.trainer.process import leave, log_to, one_line, place_of, record_last
from echelon.trainer.progress import RunProgress
from echelon.trainer.resolved import ResolvedRun
from echelon.trainer.retuning import begun_epoch, kept_epoch
from echelon.trainer.server_parts import worker_momentum

_SAYS_AFTER_S, _SAYS_AGAIN_S = 10.0, 30.0  # whom workers wait for


def run_server(
    folder: str, name: str, index: int, host: str = "", workers: int = 0, parcel: Parcel | None = None
) -> None:
    """Be a server, or its standby, to the end of the run, which begins with so many workers.

    Args:
        host: where it listens for other machines.
    """

    def serve(path: Path, run: ResolvedRun, _: UserObjects) -> None:
        """Serve until the run is over."""
        roles = path / ROLES_FOLDER
        keys = derive_keys(read_secret(roles))
        address = wait_for_address(roles, run.timeout_s)
        record = Recorder(path, patience_s=run.io_patience_s)
        config = ServerConfig(
            name, index, server_settings(run.sync), keys, address, role_address(roles, name, host),
            run.compression, run.config.training.seed, roles, optimizer_maker(run, workers),
            row_optimizer_maker(run),
        )  # fmt: skip
        Server(config, record.patience).run()
        record.close()

    _as_role(folder, name, serve, parcel)


def run_scheduler(folder: str, host: str = "", workers: int = 0, parcel: Parcel | None = None) -> None:
    """Be the scheduler to the end of the run, which begins with so many workers: it records, and shows the progress."""

    def schedule(path: Path, run: ResolvedRun, user_objects: UserObjects) -> None:
        """Schedule until the run is over, and write its report."""
        roles = path / ROLES_FOLDER
        address_file, address = roles / ADDRESS_FILE, role_address(roles, "scheduler", host)
        if address_file.exists():  # it died here: the others know it at the old address
            address = json.loads(address_file.read_text())["address"]
        keys = derive_keys(read_secret(roles))
        record = Recorder(path, patience_s=run.io_patience_s)
        chronicle = Chronicle(run, path, record, build_listeners(run.config, path, record, user_objects))
        policy = coordination_policy(server_settings(run.sync))
        plan = CoordinatorConfig(policy, _plan(run, path), run.timeout_s, workers)
        scheduler = Scheduler(SchedulerConfig(plan, keys, address, roles), record, chronicle.callbacks())
        where = json.dumps({"address": scheduler.listener.address, "pid": os.getpid()})
        record.patience.insist(address_file.name, lambda: write_atomic(address_file, where))
        status = scheduler.run()
        if status == CONTINUES:
            if begun_epoch(path) <= kept_epoch(roles):
                raise RuntimeError("no checkpoint is there from which more is to be trained")
            chronicle.pause()
            record.flush()
            _tell_status(roles, status, record)
            record.close()
            return
        seconds, others = read_launch(path).seconds_since(), scheduler.state.bytes_left
        reason, stagnant = scheduler.state.reason, scheduler.state.stagnant
        why = why_ended(reason, chronicle.task, stagnant, run.config, path)
        end = End(status, why, seconds=seconds, other_wire_bytes=others, reason=reason, stagnant=stagnant)
        record.flush()
        record.write(as_ended(path, end))
        chronicle.close(status)
        record.flush()
        _tell_status(roles, status, record)
        record.close()

    _as_role(folder, "scheduler", schedule, parcel)


def _tell_status(roles: Path, status: str, record: Recorder) -> None:
    record.patience.insist(STATUS_FILE, lambda: write_atomic(roles / STATUS_FILE, json.dumps({"status": status})))


def _as_role(
    folder: str, name: str, role: Callable[[Path, ResolvedRun, UserObjects], None], parcel: Parcel | None
) -> None:
    path = Path(folder)
    try:
        log_to(path / "logs" / f"{name}.log")
        open_notes().enter(SERVING)
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        spare_dynamo()
        user_objects = parcel.open() if parcel else UserObjects()
        role(path, resolve(load_run_config(path / "config.yaml"), user_objects.optimizer), user_objects)
    except UserError as error:
        record_last(path, Refusal(str(error), role=name))
        leave(USER_ERROR_EXIT_CODE)
    except CallbackFailed as error:
        logging.exception("a callback failed")
        record_last(path, CallbackError(str(error), role=name, place=place_of(error.__cause__ or error)))
        leave(USER_ERROR_EXIT_CODE)
    except Exception as error:
        logging.exception("this role failed")
        record_last(path, RoleFailed(f"{name}: {one_line(error)}", name, os.getpid(), place_of(error)))
        leave(1)
    sys.stdout.flush()


def _plan(run: ResolvedRun, path: Path) -> TrainingPlan:
    interval, training = run.checkpoint_every, run.config.training
    tuning, roles = run.tuning, path / ROLES_FOLDER
    until = tuning.at(kept_epoch(roles)).until if tuning.changes_later else 0
    return TrainingPlan(
        training.epochs, training.max_steps, training.eval_every, interval.steps, interval.seconds,
        training.early_stop, run.max_time_s - read_launch(path).seconds_since(), until,
    )  # fmt: skip


class _ServerShards(nn.Module):
    """A server's shards of the parameters, as the model that the optimizer's factory expects."""

    def __init__(self, tensors: Sequence[nn.Parameter], decay: Sequence[bool]) -> None:
        super().__init__()
        for i, tensor in enumerate(tensors):
            self.register_parameter(f"shard{i}", tensor)
        self._plain = [f"shard{i}" for i, wanted in enumerate(decay) if not wanted]

    def no_weight_decay(self) -> list[str]:
        """Name the shards without weight decay."""
        return self._plain


def optimizer_maker(run: ResolvedRun, workers: int) -> MakeOptimizer:
    """Return what builds the run's optimizer for a server's shards; with torch's fused kernels where it has them.

    Where each of so many workers keeps a momentum, what they push is all but the learning rate's part.
    """

    config, user_factory = run.config, run.optimizer.factory
    of_dense = replace(config.optimizer, name=dense_name(config.optimizer.name))
    if worker_momentum(run, workers) is not None:
        of_dense = replace(of_dense, momentum=0.0, weight_decay=0.0)

    def make(tensors: Sequence[nn.Parameter], decay: Sequence[bool]) -> torch.optim.Optimizer:
        """Build it; `decay` says which tensors have weight decay."""
        optimizer = build_optimizer(_ServerShards(tensors, decay), of_dense, config.data.batch_size, user_factory)
        if user_factory is None and type(optimizer) in HAVE_FUSED:
            fuse(optimizer)
        return optimizer

    return make


def row_optimizer_maker(run: ResolvedRun) -> MakeOptimizer:
    """Return what builds the run's optimizer for a server's rows of tables, whose gradients are sparse."""
    config, user_factory = run.config, run.optimizer.factory

    def make(tensors: Sequence[nn.Parameter], decay: Sequence[bool]) -> torch.optim.Optimizer:
        """Build it; `decay` says which tensors have weight decay."""
        shards, batch_size = _ServerShards(tensors, decay), config.data.batch_size
        tables = dict(shards.named_parameters())
        return build_optimizer(shards, config.optimizer, batch_size, user_factory, tables=tables)

    return make


def _with_workers(start: Start, workers: Sequence[JoinWorker]) -> Start:
    """Return a start with each process of the workers, in order of ranks; with none where some had not joined yet."""
    rows = [(worker.host, pid, worker.affinity) for worker in workers for pid in worker.pids or [worker.pid]]
    if len(rows) != start.world_size:
        return replace(start, pids=())
    hosts, pids, affinity = zip(*rows, strict=True)
    return replace(start, hosts=hosts, pids=pids, affinity=affinity)


class Chronicle:
    """Tells what the scheduler knows, as rank 0 of other runs tells it.

    Attributes:
        task: what is learnt, as the run's start has it.
    """

    def __init__(self, run: ResolvedRun, path: Path, record: Recorder, listeners: Listeners) -> None:
        self._run, self._path = run, path
        # A scheduler that came back does not know how long the run is: it records, and shows nothing.
        self.task = next((start.task for start in newest(path, Start)), BEFORE_TASKS)
        self._progress = RunProgress(record, listeners, Display(RunLength(0, 0), self.task, False))
        self._told_t = time.time()  # of the last checkpoint that listeners were told of
        self._waits_since_s = self._says_at_s = math.inf

    def callbacks(self) -> Callbacks:
        """Return what the scheduler calls."""
        return Callbacks(self._started, self._window, self._evaluated, self._waits)

    def _waits(self, awaited: Sequence[str]) -> None:
        """Say now and then whom workers that could begin wait for, and for how long."""
        now = time.monotonic()
        if not awaited:
            self._waits_since_s = self._says_at_s = math.inf
            return
        if math.isinf(self._waits_since_s):
            self._waits_since_s, self._says_at_s = now, now + _SAYS_AFTER_S
        if now >= self._says_at_s:
            where = " of the other machines" if self._run.nodes.most > 1 else ""
            seconds = format_seconds(round(now - self._waits_since_s))
            say(f"waiting for {' and '.join(awaited)}{where}, {seconds} so far")
            self._says_at_s = now + _SAYS_AGAIN_S

    def _started(self, setup: SetupDone, workers: Sequence[JoinWorker]) -> None:
        per_epoch, progress = setup.steps_per_epoch, self._progress
        done = whole_steps(setup.done_below, setup.done_beyond, setup.parts)
        length = RunLength.of(self._run.config, _plan(self._run, self._path).steps(per_epoch))
        start = replace(decode(Start, setup.about), start_step=done, start_epoch=done // per_epoch)
        start = _with_workers(start, workers)
        self.task = start.task
        progress.display = Display(length, start.task, True, done)
        progress.display.__enter__()
        progress.begins(start, self._run.described, self._path, self._run.compression.codec)
        for name, note in setup.notes:
            progress.note(name, note)
        progress.restored(done if setup.resumed else None, self._path, setup.passed_over)

    def _window(self, steps: Steps, resources: list[list[float]]) -> None:
        self._progress.window(steps, resources)
        self._progress.listeners.deliver()

    def _evaluated(self, epoch: int, result: EvaluationDone) -> None:
        self._tell_checkpoints()
        evaluation = result.evaluation
        if evaluation is None:
            return
        test = None
        if evaluation.test_metrics:
            result_of_test = EvaluationResult(evaluation.test_metrics)
            test = EvaluationReport(
                evaluation.test_loss, evaluation.test_samples, evaluation.test_seconds, result_of_test
            )
        metrics = EvaluationResult(evaluation.metrics)
        report = EvaluationReport(evaluation.loss, evaluation.samples, evaluation.seconds, metrics, test=test)
        self._progress.evaluated(epoch, evaluation.step, report)
        self._progress.epoch_ended(epoch, report)
        self._progress.listeners.deliver()

    def _tell_checkpoints(self) -> None:
        """Tell of the checkpoints that workers have recorded since the last time."""
        new = list(takewhile(lambda line: line.t > self._told_t, newest(self._path, Checkpoint)))
        self._told_t = max((line.t for line in new), default=self._told_t)
        for line in reversed(new):
            self._progress.saved(line)

    def pause(self) -> None:
        """End the display: the run goes on in another launch."""
        self._progress.display.__exit__(None, None, None)
        self._tell_checkpoints()

    def close(self, status: str) -> None:
        """End the display, and tell listeners how the run ended."""
        self.pause()
        self._progress.ended(status)
