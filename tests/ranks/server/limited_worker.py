"""A worker that may take little memory more than a process with torch: `python -m ... ADDRESS FOLDER CGROUP [whole]`.

It enters a cgroup, whose limit counts what it takes from then on. It trains a built-in model of large tables as a
worker of a run does, saves each copy that it is to evaluate, and goes on from the newest checkpoint, if there is one.
With `whole` it builds the tables whole, as where servers cannot make rows.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

from echelon.checkpoint import CheckpointStore
from echelon.compression import read
from echelon.config import build
from echelon.coordinator.messages import (
    EvaluateTask,
    EvaluationDone,
    JoinWorker,
    SetupDone,
    SetupTask,
    TaskReport,
    TrainTask,
)
from echelon.core.patience import Patience
from echelon.data.base import DataInfo
from echelon.observe.phases import HostClock
from echelon.parallel.base import alone
from echelon.ps.client import Client, ClientConfig, PushInfo
from echelon.ps.copies import ServersCopy
from echelon.ps.spans import model_table
from echelon.ps.strategy import ParameterServer, WorkerOptions
from echelon.ps.table import Cut, KeyTable, RowStart
from echelon.sync.ps import ServerSettings
from echelon.tasks.nest import TensorSpec
from echelon.trainer.parts import build_computing
from echelon.trainer.servers_checkpoint import ServersState
from echelon.trainer.state import Cursor, seed_everything
from echelon.trainer.work import Work
from echelon.trainer.world import World
from tests.ranks.layouts import SumTask
from tests.ranks.server.roles import KEYS

IDS, PAIRS, PER_EPOCH, LR = 1_900_000, 512, 100, 0.1
TABLE_BYTES = IDS * 33 * 4
LIMIT_BYTES = TABLE_BYTES // 4
SETTINGS = ServerSettings(servers=2)


class Ratings(SumTask):
    """One output of each pair."""

    outputs = 1


def batch(step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return ids of two kinds and what is to be predicted of each pair."""
    draw = torch.Generator().manual_seed(step)
    users, items = torch.randint(IDS, (PAIRS,), generator=draw), torch.randint(7, (PAIRS,), generator=draw)
    return users, items, torch.randn(PAIRS, 1, generator=draw)


def loss_of(model: nn.Module, step: int) -> Tensor:
    """Return the loss of a step's batch."""
    users, items, wanted = batch(step)
    loss: Tensor = (model(users, items) - wanted).square().mean()
    return loss


def built(starts: dict[str, RowStart] | None, ids: int = IDS) -> nn.Module:
    """Build the model; `starts` is told how rows begin, and no row is built."""
    info = DataInfo("clicks", (), 1, 1, 64, 16, (), several=(TensorSpec((), "int64", ids), TensorSpec((), "int64", 7)))
    config = build(None, {"model.name": "two_tower", "model.sparse_tables": True}).config
    seed_everything(0)
    return build_computing(
        config, Work(info, Ratings(), row_starts=starts), World(0, 1, 0, torch.device("cpu"), None, alone())
    )


class _Worker:
    def __init__(self, client: Client, folder: Path) -> None:
        starts: dict[str, RowStart] = {}
        self.model = built(starts)
        self.table: KeyTable = model_table(self.model, Cut(SETTINGS.servers, 1 << 20), starts=starts)
        self.client = client
        self.client.set_table(self.table)
        self.servers = ParameterServer(self.model, self.table, self.client, WorkerOptions(SETTINGS, 0.0, HostClock()))
        self.state = ServersState(self.servers, self.table, PER_EPOCH, Patience(folder))
        self.store, self.folder = CheckpointStore(folder / "checkpoints", 2), folder
        self.losses: list[float] = []

    def work(self) -> None:
        self.client.join(JoinWorker(self.table.fingerprint))
        while (task := self.client.next_task()) is not None:
            match task:
                case SetupTask():
                    self.client.report(self._set_up(task))
                case EvaluateTask():
                    self._save(task)
                    self.client.report(EvaluationDone(task.task))
                case TrainTask():
                    self._train(task)
        self.client.close()

    def _set_up(self, task: SetupTask) -> SetupDone:
        self.client.wait_for_servers(SETTINGS.servers)
        if (found := self.store.newest()) is not None:
            self.state.load(found[1])
        self.client.put(self.table, self.state.keys(), 120.0)
        for key, rows in self.state.rows():
            self.client.put_rows(key, rows, 120.0)
        return SetupDone(task.task, self.table.fingerprint, PER_EPOCH, self.state.below, self.state.beyond)

    def _train(self, task: TrainTask) -> None:
        self.servers.begin(PushInfo(task.task, task.step, task.share, task.shares, 0, 0, LR))
        self.servers.begin_step(PAIRS, PAIRS)
        with self.servers.micro_batch(True):
            loss = loss_of(self.servers.module, task.step)
            loss.backward()
        self.servers.step()
        self.losses.append(float(loss.detach()))
        self.client.finish_task(task.task, TaskReport(self.losses[-1], 0.0, 1, LR, [], 0, None, {}))

    def _save(self, task: EvaluateTask) -> None:
        copy = ServersCopy(*self.client.fetch_copy(self.table, task.tag, self.folder), task.tag)
        self.servers.copy = copy
        with self.servers.agreed(), torch.no_grad():
            self.losses.append(float(loss_of(self.model, 0)))
        with self.state.captured(Cursor(0, task.step, task.step), self.store) as captured:
            assert captured is not None
            self.store.save(task.step, captured.tree, arriving=captured.arriving, background=False)
        self.servers.copy = None


def main() -> None:
    """Be the worker."""
    torch.set_num_threads(1)
    client = Client(ClientConfig("worker0", KEYS, sys.argv[1], read("none"), 0, 0, 120.0))
    built(None, 50)(torch.zeros(2, dtype=torch.int64), torch.zeros(2, dtype=torch.int64)).sum().backward()
    (Path(sys.argv[3]) / "cgroup.procs").write_text(str(os.getpid()))
    if sys.argv[4:] == ["whole"]:
        built(None)
        return
    worker = _Worker(client, Path(sys.argv[2]))
    worker.work()
    (Path(sys.argv[2]) / "losses.json").write_text(json.dumps(worker.losses))


if __name__ == "__main__":
    main()
