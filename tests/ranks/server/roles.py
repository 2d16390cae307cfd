"""Scheduler, servers and workers as threads of the test's process: real sockets, keys and messages."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
import zmq
from torch import Tensor, nn

from echelon.compression import read
from echelon.coordinator.config import CoordinatorConfig, TrainingPlan
from echelon.coordinator.messages import (
    Died,
    EvaluateTask,
    EvaluationDone,
    JoinWorker,
    SetupDone,
    SetupTask,
    TaskReport,
    TrainTask,
)
from echelon.coordinator.scheduler import Callbacks, Scheduler, SchedulerConfig
from echelon.core.state_tree import StateTree
from echelon.messages.endpoint import Channel, Sender
from echelon.messages.identity import RunKeys, derive_keys
from echelon.messages.sockets import Limits
from echelon.observe.phases import HostClock
from echelon.ps.client import Client, ClientConfig, PushInfo, RowsOf
from echelon.ps.server import Server, ServerConfig
from echelon.ps.serving import coordination_policy
from echelon.ps.spans import model_table
from echelon.ps.strategy import ParameterServer, WorkerOptions
from echelon.ps.table import Cut, KeyTable, RowStart
from echelon.records.file import Recorder
from echelon.records.kinds import Steps
from echelon.sync.base import StepAbandoned
from echelon.sync.ps import ServerSettings

Optimizer = Callable[[Sequence[Tensor]], torch.optim.Optimizer]
KEYS = derive_keys(b"t" * 32)


@dataclass
class Cluster:
    """One run's roles; `stop` joins them all. `running`: those that a test has not joined yet, for it to end them.

    Attributes:
        host: on whose address scheduler and servers listen.
        address: of the scheduler, which `start` sets; given, workers of it may run here without the rest.
    """

    running: ClassVar[list[Cluster]] = []

    folder: Path
    settings: ServerSettings
    optimizer: Optimizer
    plan: TrainingPlan
    compression: str = "none"
    keys: RunKeys = KEYS
    timeout_s: float = 30.0
    threads: list[threading.Thread] = field(default_factory=list)
    failures: list[BaseException] = field(default_factory=list)
    roles: list[Server] = field(default_factory=list)
    serving: dict[str, threading.Thread] = field(default_factory=dict)
    windows: list[Steps] = field(default_factory=list)
    starts: Mapping[str, RowStart] = field(default_factory=dict)
    host: str = "127.0.0.1"
    address: str = ""

    def start(self) -> None:
        """Start scheduler and servers."""
        config = SchedulerConfig(
            CoordinatorConfig(coordination_policy(self.settings), self.plan, self.timeout_s), self.keys,
            f"tcp://{self.host}:0", self.folder,
        )  # fmt: skip
        ignore = lambda *_: None  # noqa: E731
        self.record = Recorder(self.folder)
        self.scheduler = Scheduler(
            config, self.record, Callbacks(ignore, lambda steps, _: self.windows.append(steps), ignore, ignore)
        )
        self.address = self.scheduler.listener.address
        self._spawn(self.scheduler.run)
        self.running.append(self)
        self.servers = [self.server(i) for i in range(self.settings.servers)]

    def server(self, index: int, name: str = "") -> Server:
        """Start one server."""
        config = ServerConfig(
            name or f"server{index}", index, self.settings, self.keys, self.address, f"tcp://{self.host}:0",
            read(self.compression), 0, self.folder, lambda tensors, decay: self.optimizer(tensors),
        )  # fmt: skip
        server = Server(config)
        self.roles.append(server)
        self._spawn(server.run)
        self.serving[server.config.name] = self.threads[-1]
        return server

    def client(self, number: int) -> Client:
        """Connect a worker."""
        return Client(
            ClientConfig(f"worker{number}", self.keys, self.address, read(self.compression), 0,
                         number, 20.0, keeps=self.settings.replicas == 0, aggregates=self.settings.aggregates,
                         by_priority=self.settings.by_priority)
        )  # fmt: skip

    def work(self, number: int, model: nn.Module, gradient: Callable[[nn.Module, TrainTask], float],
             lr: float, seen: list[Any]) -> None:  # fmt: skip
        """Run one worker to the end of the run, in a thread."""
        self._spawn(lambda: self.work_here(number, model, gradient, lr, seen))

    def work_here(self, number: int, model: nn.Module, gradient: Any, lr: float, seen: list[Any]) -> None:
        """Run one worker to the end of the run."""
        client = self.client(number)
        table = model_table(model, Cut(self.settings.servers, self.settings.chunk_bytes), starts=self.starts)
        try:
            self._tasks(client, model, table, gradient, lr, seen)
        finally:
            client.close()

    def _tasks(
        self, client: Client, model: nn.Module, table: KeyTable, gradient: Any, lr: float, seen: list[Any]
    ) -> None:
        client.join(JoinWorker(table.fingerprint))
        client.set_table(table)
        strategy = ParameterServer(model, table, client, WorkerOptions(self.settings, 0.0, HostClock()))
        while (task := client.next_task()) is not None:
            if isinstance(task, SetupTask):
                client.wait_for_servers(self.settings.servers)
                states: dict[int, StateTree] = {k.index: {"version": 0} for k in table.keys}
                states |= {k: {"value": v, "version": 0} for k, v in strategy.key_values().items()}
                client.put(table, states, 10.0)
                client.report(SetupDone(task.task, table.fingerprint, self.plan.max_steps, 0, []))
            elif isinstance(task, EvaluateTask):
                seen.append((task, self._copied(client, table, task.tag)))
                client.report(EvaluationDone(task.task))
            else:
                with contextlib.suppress(StepAbandoned):
                    self._train(client, strategy, task, gradient, lr)

    def _copied(self, client: Client, table: KeyTable, tag: int) -> Tensor:
        """Return all values of the servers' copy, 1-D."""
        if not self.starts:
            values = client.fetch(table, [k.index for k in table.keys], tag, full=False)
            return torch.cat([values[k.index]["value"] for k in table.keys])
        states, _ = client.fetch_copy(table, tag, self.folder)
        made = [k for k in table.keys if k.begins is not None]
        rows = client.rows([(k, torch.arange(k.rows)) for k in made], RowsOf(tag=tag))
        values = {k.index: of_key.reshape(-1) for k, of_key in zip(made, rows, strict=True)}
        return torch.cat([values[i] if i in values else states[i]["value"] for i in range(len(table.keys))])

    def _train(self, client: Client, strategy: ParameterServer, task: TrainTask, gradient: Any, lr: float) -> None:
        info = PushInfo(task.task, task.step, task.share, task.shares, 0, 1, lr)
        strategy.begin(info)
        strategy.begin_step(1, 1)
        with strategy.micro_batch(True):
            loss = gradient(strategy.module, task)
        strategy.step()
        report = TaskReport(loss, 0.0, 1, lr, [], 0, strategy.density(), dict(strategy.entropy_coded()))
        client.finish_task(task.task, report)

    def _spawn(self, run: Callable[[], Any]) -> None:
        def guarded() -> None:
            try:
                run()
            except BaseException as error:  # noqa: BLE001 - shown by `stop`
                self.failures.append(error)

        self.threads.append(threading.Thread(target=guarded, daemon=True))
        self.threads[-1].start()

    def kill(self, server: Server) -> None:
        """End a server at once, without a word; the launcher tells the scheduler."""
        server.state.ended = True
        self.serving[server.config.name].join(10)  # threads of one process share the lock of the snapshots' folder
        line = Channel(zmq.Context.instance(), Sender(self.keys, "launcher"), self.address, Limits(1 << 20), {})
        line.send(Died(server.config.name))
        line.close(linger_ms=1000)
        ends = time.monotonic() + 10
        while self.scheduler.state.members.get(server.config.name) is not None:  # its next life comes after its death
            assert time.monotonic() < ends, "the scheduler did not hear of a death"
            time.sleep(0.001)

    def end(self) -> None:
        """End every role now, and wait for them."""
        for server in self.roles:
            server.state.ended = True
        self.scheduler.state.status = self.scheduler.state.status or "stopped"
        self.stop()

    def stop(self, timeout_s: float = 30, expect: tuple[type[BaseException], ...] = ()) -> None:
        """Wait until every role has ended by itself, or with what is expected."""
        if self in self.running:
            self.running.remove(self)
        for thread in self.threads:
            thread.join(timeout_s)
        self.record.close()
        for failure in self.failures:
            if not isinstance(failure, expect):
                raise failure
        assert not any(t.is_alive() for t in self.threads), "a role did not end"
