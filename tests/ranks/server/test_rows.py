"""Rows of tables under `ps(...)`: one asynchronous worker is one process, and what travels is touched rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.coordinator.config import TrainingPlan
from echelon.coordinator.messages import TrainTask
from echelon.parallel.row_values import RowDraw, fill_rows
from echelon.ps.table import RowStart
from echelon.sync.ps import ServerSettings
from tests.ranks.server.roles import Cluster

STEPS, ROWS, WIDTH, LR = 8, 5000, 32, 0.1
IDS = 512  # looked up in a step


class Tower(nn.Module):
    """Two lookups in one table, a table of bags, and a dense layer between them."""

    def __init__(self) -> None:
        super().__init__()
        self.items = nn.Embedding(ROWS, WIDTH, sparse=True)
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.bags = nn.EmbeddingBag(ROWS, WIDTH, mode="sum", sparse=True)

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.dense(self.items(ids)) + self.bags(input=ids[:, None]) + self.items(mirrored(ids))
        return out


def mirrored(ids: Tensor) -> Tensor:
    """Return a second id for each sample, of it alone: a step has the same gradient in however many shares."""
    return (ROWS - 1 - ids) // 2


def tower() -> Tower:
    torch.manual_seed(0)
    return Tower().double()


def ids_of(step: int) -> Tensor:
    return torch.randint(ROWS, (IDS,), generator=torch.Generator().manual_seed(step))


def adagrad(tensors: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(tensors, lr=LR)


def gradient(module: nn.Module, task: TrainTask) -> float:
    loss: Tensor = module(ids_of(task.step)).square().sum() / IDS
    loss.backward()
    return float(loss.detach())


def sgd(tensors: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(tensors, lr=LR)


def alone(model: nn.Module, build: Any = adagrad) -> Tensor:
    """Train in one process; returns all parameters, 1-D."""
    optimizer = build(model.parameters())
    for step in range(STEPS):
        model(ids_of(step)).square().sum().div(IDS).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def touched_rows() -> int:
    """Count the rows that all steps look up, each once in a step and a table."""
    return sum(len(torch.cat([ids, mirrored(ids)]).unique()) + len(ids.unique()) for ids in map(ids_of, range(STEPS)))


def check_bytes(cluster: Cluster, pushed: int = 8) -> None:
    """Check what travelled; `pushed`: bytes of an element of a gradient."""
    dense = WIDTH * WIDTH + WIDTH
    rows = touched_rows() * (WIDTH * (8 + pushed) + 2 * 4)
    wire = sum(window.wire_bytes for window in cluster.windows)
    assert rows < wire - STEPS * dense * 2 * pushed <= 1.2 * rows  # what is dense is encoded both ways


def test_one_asynchronous_worker_is_one_process_and_sends_touched_rows_alone(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path, ServerSettings(servers=2), adagrad, TrainingPlan(1, STEPS, 0, None, None))
    cluster.start()
    seen: list[Any] = []
    cluster.work(0, tower(), gradient, LR, seen)
    cluster.stop()
    torch.testing.assert_close(seen[-1][1], alone(tower()), atol=1e-12, rtol=0)
    check_bytes(cluster)


def test_gradients_of_rows_are_pushed_through_a_codec(tmp_path: Path) -> None:
    plan = TrainingPlan(1, STEPS, 0, None, None)
    cluster = Cluster(tmp_path, ServerSettings(servers=2), sgd, plan, compression="fp16")
    cluster.start()
    seen: list[Any] = []
    cluster.work(0, tower(), gradient, LR, seen)
    cluster.stop()
    assert 0 < float((seen[-1][1] - alone(tower(), sgd)).abs().max()) < 1e-3
    check_bytes(cluster, pushed=2)


STARTS = {
    "items.weight": RowStart(RowDraw("normal", 0.0, 1.0), 3, "items.weight"),
    "bags.weight": RowStart(RowDraw("uniform", -1.0, 1.0, {2: 0.0}), 3, "bags.weight"),
}


def whole_tower() -> Tower:
    """Build the model with tables whose rows begin as `STARTS` says."""
    model = tower()
    for name, start in STARTS.items():
        fill_rows(model.get_parameter(name).detach(), 0, start.draw, start.seed, name)
    return model


def served_tower() -> Tower:
    """Build the model with tables that have no rows."""
    model = tower()
    for name in STARTS:
        table = model.get_submodule(name.removesuffix(".weight"))
        table.weight = nn.Parameter(torch.empty(0, WIDTH, dtype=torch.float64))
    return model


def test_rows_that_servers_make_are_those_of_one_process_and_no_worker_has_a_table(tmp_path: Path) -> None:
    plan, served = TrainingPlan(1, STEPS, 0, None, None), served_tower()
    cluster = Cluster(tmp_path, ServerSettings(servers=2), adagrad, plan, starts=STARTS)
    cluster.start()
    seen: list[Any] = []
    cluster.work(0, served, gradient, LR, seen)
    cluster.stop()
    torch.testing.assert_close(seen[-1][1], alone(whole_tower()), atol=1e-12, rtol=0)
    check_bytes(cluster)
    assert all(len(served.get_parameter(name)) == 0 for name in STARTS)
    stores = [store for server in cluster.roles for store in server.state.stores.values() if store.made is not None]
    looked_up = [torch.cat([i, mirrored(i)]) for i in map(ids_of, range(STEPS))], [*map(ids_of, range(STEPS))]
    wanted = sum(len(torch.cat(of_table).unique()) for of_table in looked_up)
    assert sum(store.made.count for store in stores if store.made is not None) == wanted
    assert sum(store.value.numel() for store in stores) < 2 * ROWS * WIDTH


@pytest.mark.parametrize("replicas", [0, 1])
def test_rows_of_a_server_that_dies_are_made_or_come_again(tmp_path: Path, replicas: int) -> None:
    settings, plan = ServerSettings(replicas=replicas, snapshot_every=2), TrainingPlan(1, STEPS, 0, None, None)
    cluster = Cluster(tmp_path, settings, adagrad, plan, starts=STARTS)
    cluster.start()
    if replicas:
        cluster.server(0, "standby0")
    struck: list[int] = []

    def strike(module: nn.Module, task: TrainTask) -> float:
        if task.step == STEPS // 2 and not struck:
            struck.append(task.step)
            cluster.kill(cluster.servers[0])
            if not replicas:
                cluster.server(0)
        return gradient(module, task)

    seen: list[Any] = []
    cluster.work(0, served_tower(), strike, LR, seen)
    cluster.stop()
    assert struck
    torch.testing.assert_close(seen[-1][1], alone(whole_tower()), atol=1e-12, rtol=0)


def gradient_of_share(module: nn.Module, task: TrainTask) -> float:
    loss: Tensor = module(ids_of(task.step)[task.share :: task.shares]).square().sum() / IDS
    loss.backward()
    return float(loss.detach())


def alone_in_shares(model: nn.Module, shares: int) -> Tensor:
    """Train in one process on the sum of the shares' losses; returns all parameters, 1-D."""
    optimizer = adagrad(model.parameters())
    for step in range(STEPS):
        for share in range(shares):
            model(ids_of(step)[share::shares]).square().sum().div(IDS).backward()
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize("starts", [{}, STARTS], ids=["given", "made"])
@pytest.mark.parametrize("mode", ["sync", "ssp"])
def test_rows_of_all_workers_are_summed_before_an_update(tmp_path: Path, mode: str, starts: Any) -> None:
    settings = ServerSettings("sync", servers=2) if mode == "sync" else ServerSettings("ssp", staleness=0)
    plan = TrainingPlan(1, STEPS, 0, None, None)
    cluster = Cluster(tmp_path, settings, adagrad, plan, starts=starts)
    cluster.start()
    seen: list[Any] = []
    for worker in range(2):
        cluster.work(worker, served_tower() if starts else tower(), gradient_of_share, LR, seen)
    cluster.stop()
    expected = alone_in_shares(whole_tower() if starts else tower(), 2)
    torch.testing.assert_close(seen[-1][1], expected, atol=1e-12, rtol=0)


@pytest.mark.parametrize("replicas", [0, 1])
def test_sums_of_rows_survive_a_server(tmp_path: Path, replicas: int) -> None:
    settings = ServerSettings("sync", replicas=replicas, snapshot_every=1)
    cluster = Cluster(tmp_path, settings, adagrad, TrainingPlan(1, STEPS, 0, None, None), starts=STARTS)
    cluster.start()
    if replicas:
        cluster.server(0, "standby0")
    struck: list[int] = []

    def strike(module: nn.Module, task: TrainTask) -> float:
        loss = gradient_of_share(module, task)
        if task.step == STEPS // 2 and task.share and not struck:
            struck.append(task.step)  # its rows and the other share's may be counted, and wait for each other
            cluster.kill(cluster.servers[0])
            if not replicas:
                cluster.server(0)
        return loss

    seen: list[Any] = []
    for worker in range(2):
        cluster.work(worker, served_tower(), strike, LR, seen)
    cluster.stop()
    assert struck
    torch.testing.assert_close(seen[-1][1], alone_in_shares(whole_tower(), 2), atol=1e-12, rtol=0)
