"""Processes of the straggler benchmark: workers on leases or collectives, and the scheduler and server of `ps(...)`.

What a worker computes is the caller's; around it everything is real: processes, messages, updates.
"""

from __future__ import annotations

import json
import multiprocessing
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
from torch import nn

from echelon.compression import read
from echelon.coordinator.config import CoordinatorConfig, TrainingPlan
from echelon.coordinator.messages import (
    EvaluateTask,
    EvaluationDone,
    JoinWorker,
    SetupDone,
    SetupTask,
    TaskReport,
    TrainTask,
)
from echelon.coordinator.scheduler import Callbacks, Scheduler, SchedulerConfig
from echelon.core.spec import bind, parse_spec
from echelon.launch.places.local import start_import_server
from echelon.messages.identity import derive_keys
from echelon.observe.phases import HostClock
from echelon.ps.client import Client, ClientConfig, PushInfo
from echelon.ps.server import Server, ServerConfig
from echelon.ps.serving import coordination_policy
from echelon.ps.spans import model_table
from echelon.ps.strategy import ParameterServer, WorkerOptions
from echelon.ps.table import Cut
from echelon.records.file import Recorder
from echelon.sync.ps import ServerSettings

WORKERS = 4
SECRET = b"s" * 32
DEADLINE_S = 60.0
PRELOAD = ("torch", "torch._dynamo", "zmq", "torch.distributed", "benchmarks._straggler_roles")


@dataclass(frozen=True)
class Job:
    """One run: how replicas agree, for how many steps, with which learning rate."""

    way: str
    lr: float
    epochs: int
    steps_per_epoch: int

    @property
    def settings(self) -> ServerSettings:
        """The settings of `ps(...)`."""
        return bind(parse_spec(self.way), ServerSettings)


@dataclass(frozen=True)
class Work:
    """What a worker does: `compute` makes gradients of a lease and returns samples; `review` looks at a copy."""

    model: Callable[[], nn.Module]
    compute: Callable[[nn.Module, TrainTask], int]
    samples_per_step: Callable[[TrainTask], int]
    over: Callable[[int, int], bool] = lambda done, late: False
    review: Callable[[nn.Module], None] = lambda module: None


def ready() -> None:
    """Start the process that all others are forked from."""
    start_import_server(PRELOAD)


def process(target: Callable[..., None], *args: Any) -> BaseProcess:
    """Start a process."""
    own = multiprocessing.get_context("forkserver").Process(target=target, args=args, daemon=True)  # type: ignore[attr-defined]
    own.start()
    return own  # type: ignore[no-any-return]


def queue() -> Any:
    """Return a queue to hand to processes."""
    return multiprocessing.get_context("forkserver").Queue()


@dataclass(frozen=True)
class Roles:
    """Scheduler and server that run: the scheduler's address, and the folder of the record."""

    address: str
    folder: Path
    process: BaseProcess

    def wait(self) -> None:
        """Wait until they have ended by themselves."""
        self.process.join(10)


@contextmanager
def roles(job: Job) -> Iterator[Roles]:
    """Run scheduler and server in a process of their own."""
    with tempfile.TemporaryDirectory(prefix="straggler-") as folder:
        here, there = multiprocessing.get_context("forkserver").Pipe(duplex=False)
        own = process(_serve, job, folder, there)
        try:
            if not here.poll(DEADLINE_S):
                raise TimeoutError("the server did not start")
            yield Roles(here.recv(), Path(folder), own)
        finally:
            own.kill()
            own.join()


def _serve(job: Job, folder: str, address: Any) -> None:
    torch.set_num_threads(1)
    keys, path = derive_keys(SECRET), Path(folder)

    def nothing(*ignored: Any) -> None:
        pass

    plan = TrainingPlan(job.epochs, 0, 0, None, None)
    coordinator = CoordinatorConfig(coordination_policy(job.settings), plan, DEADLINE_S)
    config = SchedulerConfig(coordinator, keys, f"ipc://{folder}/scheduler", path)
    scheduler = Scheduler(config, Recorder(path), Callbacks(nothing, nothing, nothing))
    thread = threading.Thread(target=scheduler.run, daemon=True)
    thread.start()
    where = f"ipc://{folder}/server0"
    server = Server(ServerConfig("server0", 0, job.settings, keys, scheduler.listener.address, where, read("none"), 0,
                                 path, lambda tensors, decay: torch.optim.SGD(tensors, lr=job.lr)))  # fmt: skip
    address.send(scheduler.listener.address)
    server.run()
    thread.join(5)


def staleness(folder: Path) -> float:
    """Return the mean staleness that the server counted; NaN without a record of it."""
    counts: dict[str, int] = {}
    for line in (folder / "record.jsonl").read_text().splitlines():
        entry = json.loads(line)
        if entry["kind"] == "server":
            counts = entry["staleness"]
    total = sum(counts.values())
    return sum(int(age) * n for age, n in counts.items()) / total if total else float("nan")


def lease_worker(rank: int, job: Job, address: str, work: Work) -> Client:
    """Be a worker until the run ends, or `work.over`; returns the client, which is to be closed."""
    torch.set_num_threads(1)
    settings, module = job.settings, work.model()
    client = Client(ClientConfig(f"worker{rank}", derive_keys(SECRET), address, read("none"), 0, rank, DEADLINE_S,
                                 aggregates=settings.aggregates))  # fmt: skip
    table = model_table(module, Cut(1, settings.chunk_bytes))
    client.set_table(table)
    client.join(JoinWorker(table.fingerprint))
    strategy = ParameterServer(module, table, client, WorkerOptions(settings, 0.0, HostClock()))
    done = 0
    while (task := client.next_task()) is not None:
        if isinstance(task, SetupTask):
            client.wait_for_servers(1)
            client.put(table, {k: {"value": v, "version": 0} for k, v in strategy.key_values().items()}, DEADLINE_S)
            client.report(SetupDone(task.task, table.fingerprint, job.steps_per_epoch, 0, []))
        elif isinstance(task, EvaluateTask):
            states = client.fetch(table, [k.index for k in table.keys], task.tag, full=False)
            strategy.set_parameters({index: state["value"] for index, state in states.items()})
            work.review(module)
            client.report(EvaluationDone(task.task))
        else:
            _train(client, strategy, work, task, job.lr)
            done += 1
            if work.over(done, client.stats.late // len(table.keys)):
                break
    return client


def _train(client: Client, strategy: ParameterServer, work: Work, task: TrainTask, lr: float) -> None:
    strategy.begin(PushInfo(task.task, task.step, task.share, task.shares, 0, 0, lr))
    strategy.begin_step(work.samples_per_step(task), work.samples_per_step(replace(task, shares=1)))
    with strategy.micro_batch(True):
        samples = work.compute(strategy.module, task)
    strategy.step()
    client.finish_task(task.task, TaskReport(0.0, 0.0, samples, lr, [], 0))
