"""Pushes and pulls in the order of the forward pass: the same bits, also when workers and servers die ahead."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from echelon.coordinator.config import TrainingPlan
from echelon.coordinator.messages import TrainTask
from echelon.sync.ps import ServerSettings
from tests.ranks.server import test_rows as tables
from tests.ranks.server.roles import Cluster
from tests.ranks.server.test_deaths import STEPS, Walks, _walk, cluster, done_tasks, share_gradient

READY = ServerSettings("sync", servers=2, chunk_kb=4)
PRIORITY = replace(READY, order="priority")


def model() -> nn.Module:
    """Several keys on each server; the last layers are the largest."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 20), nn.Tanh(), nn.Linear(20, 100), nn.Tanh(), nn.Linear(100, 60))


def trained(folder: Path, settings: ServerSettings, compression: str = "none") -> tuple[Tensor, Cluster]:
    """Train with two workers; returns the servers' parameters, and the run."""
    folder.mkdir()
    run = cluster(folder, settings)
    run.compression = compression
    run.start()
    for index in range(settings.servers * settings.replicas):
        run.server(index, f"standby{index}")
    seen: list[Any] = []
    for worker in range(2):
        run.work(worker, model(), share_gradient, 0.01, seen)
    run.stop()
    values: Tensor = seen[-1][1]
    return values, run


@pytest.mark.parametrize("compression", ["none", "topk(density=0.1)", "int8"])
def test_a_synchronous_run_has_the_bits_of_the_other_order(tmp_path: Path, compression: str) -> None:
    ready, _ = trained(tmp_path / "ready", READY, compression)
    priority, run = trained(tmp_path / "priority", PRIORITY, compression)
    assert torch.equal(ready, priority)
    assert len(done_tasks(tmp_path / "priority")) == len(done_tasks(tmp_path / "ready"))
    assert not any(server.sender.traffic.dropped for server in run.servers)


def test_a_standby_holds_the_same_bits(tmp_path: Path) -> None:
    ready, _ = trained(tmp_path / "ready", READY)
    priority, _ = trained(tmp_path / "priority", replace(PRIORITY, replicas=1))
    assert torch.equal(ready, priority)


@pytest.mark.parametrize("mode", ["async", "ssp"])
def test_every_batch_once_where_nobody_waits(tmp_path: Path, mode: str) -> None:
    _, run = trained(tmp_path / "run", ServerSettings(mode, servers=2, chunk_kb=4, order="priority"))
    assert set(done_tasks(tmp_path / "run").values()) == {1}
    assert all(sum(s.state.load.staleness.values()) == STEPS * len(s.state.stores) for s in run.servers)


@pytest.mark.parametrize("starts", [{}, tables.STARTS], ids=["given", "made"])
def test_rows_of_tables_have_the_bits_of_the_other_order(tmp_path: Path, starts: Any) -> None:
    values = []
    for settings in (READY, PRIORITY):
        (folder := tmp_path / settings.order).mkdir()
        run = Cluster(folder, settings, tables.adagrad, TrainingPlan(1, tables.STEPS, 0, None, None), starts=starts)
        run.start()
        seen: list[Any] = []
        for worker in range(2):
            model = tables.served_tower() if starts else tables.tower()
            run.work(worker, model, tables.gradient_of_share, tables.LR, seen)
        run.stop()
        values.append(seen[-1][1])
    assert torch.equal(*values)


def test_a_worker_that_comes_while_others_are_ahead_takes_part(tmp_path: Path) -> None:
    run = cluster(tmp_path, PRIORITY)
    run.start()
    came, lock, by, seen = threading.Event(), threading.Lock(), set[int](), list[Any]()

    def worker(number: int) -> None:
        def count(module: nn.Module, task: TrainTask) -> float:
            with lock:
                by.add(number)
                if task.step > 10 and not came.is_set():
                    came.set()
                    worker(2)
            ends = time.monotonic() + 20
            while came.is_set() and run.scheduler.state.members.get("worker2") is None:
                assert time.monotonic() < ends, "it does not join"
                time.sleep(0.001)
            return share_gradient(module, task)

        run.work(number, model(), count, 0.01, seen)

    for number in range(2):
        worker(number)
    assert came.wait(20)
    run.stop()
    assert set(done_tasks(tmp_path).values()) == {1} and by == {0, 1, 2}
    wanted, _ = trained(tmp_path / "two", READY)
    torch.testing.assert_close(seen[-1][1], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("between_pieces", [True, False])
def test_a_worker_that_dies_leaves_the_others_exact(tmp_path: Path, between_pieces: bool) -> None:
    """In the middle of its pushes, or before any: the other, which has begun the next step, does its share."""
    seen: list[Any] = []
    run = cluster(tmp_path, PRIORITY)
    run.start()
    vanished, began = threading.Event(), threading.Event()

    def vanish(module: nn.Module, task: TrainTask) -> float:
        if task.step > 10:
            vanished.set()
            if not between_pieces:
                raise Walks
            next(module.parameters()).register_hook(_walk)
        began.set()
        return share_gradient(module, task)

    run.work(0, model(), share_gradient, 0.01, seen)
    run.work(1, model(), vanish, 0.01, seen)
    run.stop(expect=(Walks,))
    assert vanished.is_set()
    assert set(done_tasks(tmp_path).values()) == {1}
    whole: Tensor = seen[-1][1]
    (tmp_path / "whole").mkdir()
    undisturbed, _ = trained(tmp_path / "whole" / "run", READY)
    torch.testing.assert_close(whole, undisturbed, rtol=1e-5, atol=1e-6)  # one share is summed in another order


@pytest.mark.parametrize("replicas", [0, 1])
def test_a_server_that_dies_changes_nothing(tmp_path: Path, replicas: int) -> None:
    wanted, _ = trained(tmp_path / "whole", READY)
    folder = tmp_path / "struck"
    folder.mkdir()
    run = cluster(folder, replace(PRIORITY, replicas=replicas, snapshot_every=5))
    run.start()
    for index in range(2 * replicas):
        run.server(index, f"standby{index}")
    lock, struck, seen = threading.Lock(), threading.Event(), list[Any]()

    def strike(module: nn.Module, task: TrainTask) -> float:
        with lock:
            if task.step > 20 and not struck.is_set():
                struck.set()
                run.kill(run.servers[0])
                if not replicas:
                    run.server(0)
        return share_gradient(module, task)

    for worker in range(2):
        run.work(worker, model(), strike, 0.01, seen)
    run.stop()
    assert struck.is_set()
    torch.testing.assert_close(seen[-1][1], wanted, rtol=1e-5, atol=1e-6)
