"""Workers, servers and standbys that vanish: training goes on, and every batch is counted once."""

from __future__ import annotations

import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from echelon.coordinator.config import TrainingPlan
from echelon.coordinator.messages import TrainTask
from echelon.sync.ps import ServerSettings
from tests.ranks.server.roles import Cluster

STEPS = 60


class Walks(Exception):
    """Raised where a worker is to vanish."""


def _walk(gradient: torch.Tensor) -> None:
    raise Walks


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 40), nn.Tanh(), nn.Linear(40, 2))


def gradient(module: nn.Module, task: TrainTask) -> float:
    generator = torch.Generator().manual_seed(task.step)
    loss = module(torch.randn(4, 5, generator=generator)).square().sum() / 4
    loss.backward()
    return float(loss.detach())


def done_tasks(folder: Path) -> Counter[int]:
    lines = [json.loads(line) for line in (folder / "scheduler.jsonl").read_text().splitlines()]
    return Counter(e["task"] for e in lines if e["kind"] == "done")


def events(folder: Path) -> dict[str, dict[str, Any]]:
    lines = [json.loads(line) for line in (folder / "record.jsonl").read_text().splitlines()]
    return {e["name"]: e for e in lines if e["kind"] == "event"}


def cluster(folder: Path, settings: ServerSettings) -> Cluster:
    def sgd(tensors: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(tensors, lr=0.01, momentum=0.9)

    return Cluster(folder, settings, sgd, TrainingPlan(1, STEPS, 0, None, None))


SPECS = [
    ServerSettings("async", servers=2, chunk_kb=4),
    ServerSettings("ssp", staleness=2),
    ServerSettings("async", compensation="adaptive", by_staleness=True, decay_s=5.0, momentum_correction=True),
]


@pytest.mark.parametrize("settings", SPECS, ids=lambda s: f"{s.mode}-{s.compensation}")
@pytest.mark.parametrize("compression", ["none", "topk(density=0.1)"])
def test_every_batch_once(tmp_path: Path, settings: ServerSettings, compression: str) -> None:
    run = cluster(tmp_path, settings)
    run.compression = compression
    run.start()
    seen: list[Any] = []
    for worker in range(3):
        run.work(worker, model(), gradient, 0.01, seen)
    run.stop()
    assert done_tasks(tmp_path) == Counter(range(STEPS))
    assert all(sum(s.state.load.staleness.values()) == STEPS * len(s.state.stores) for s in run.servers)
    assert not any(s.sender.traffic.dropped for s in run.servers)


def test_what_pushes_carry_and_what_entropy_coding_did_is_recorded(tmp_path: Path) -> None:
    run = cluster(tmp_path, ServerSettings("async", servers=2))
    run.compression = "topk(density=0.1)+huffman"
    run.start()
    for worker in range(2):
        run.work(worker, model(), gradient, 0.01, [])
    run.stop()
    numel = sum(p.numel() for p in model().parameters())
    assert [w.density for w in run.windows] == [pytest.approx(0.1, abs=2 / numel)] * len(run.windows)
    lines = [json.loads(line) for line in (tmp_path / "record.jsonl").read_text().splitlines()]
    last = [line for line in lines if line["kind"] == "entropy_coding"][-1]
    assert last["sent_bytes"] > 0 and last["plain_bytes"] > 0
    assert last["planes_coded"] + last["planes_plain"] > 0


def test_a_slow_backup_worker_holds_nobody_back(tmp_path: Path) -> None:
    run = cluster(tmp_path, ServerSettings("sync", backup=1))
    run.start()
    seen: list[Any] = []
    reached, moved = [0], threading.Condition()

    def quick(module: nn.Module, task: TrainTask) -> float:
        with moved:
            reached[0] = max(reached[0], task.step)
            moved.notify_all()
        return gradient(module, task)

    def slow(module: nn.Module, task: TrainTask) -> float:
        with moved:  # the others go three steps ahead of it each time
            assert moved.wait_for(lambda: reached[0] >= min(task.step + 3, STEPS - 1), 20)
        return gradient(module, task)

    for worker, way in enumerate((quick, quick, slow)):
        run.work(worker, model(), way, 0.01, seen)
    run.stop()
    assert len({task // 4096 for task in done_tasks(tmp_path)}) == STEPS
    assert run.servers[0].state.load.late > 0


def test_a_worker_that_vanishes_in_the_middle_of_its_pushes(tmp_path: Path) -> None:
    run = cluster(tmp_path, ServerSettings("async", servers=2, chunk_kb=4))
    run.start()
    seen: list[Any] = []
    vanished = threading.Event()

    def vanish(module: nn.Module, task: TrainTask) -> float:
        if task.step > 10:
            next(module.parameters()).register_hook(_walk)
            vanished.set()
        return gradient(module, task)

    run.work(0, model(), gradient, 0.01, seen)
    run.work(1, model(), vanish, 0.01, seen)
    run.stop(expect=(Walks,))
    assert vanished.is_set()
    assert done_tasks(tmp_path) == Counter(range(STEPS))


@pytest.mark.parametrize("replicas", [0, 1])
def test_a_server_that_dies_comes_back(tmp_path: Path, replicas: int) -> None:
    run = cluster(tmp_path, ServerSettings("async", replicas=replicas, snapshot_every=5))
    run.start()
    if replicas:
        run.server(0, "standby0")
    seen: list[Any] = []
    struck = threading.Event()

    def strike(module: nn.Module, task: TrainTask) -> float:
        if task.step > 20 and not struck.is_set():
            struck.set()
            run.kill(run.servers[0])
            if not replicas:
                run.server(0)
        return gradient(module, task)

    for worker in range(2):
        run.work(worker, model(), strike, 0.01, seen)
    run.stop()
    assert struck.is_set()
    assert done_tasks(tmp_path) == Counter(range(STEPS))
    if not replicas:
        assert events(tmp_path)["server_settled"]["lost"] == 0


def struck_sync(folder: Path, settings: ServerSettings, struck: threading.Event) -> torch.Tensor:
    """Train synchronously; the first server is killed once, unless that is set already. Returns the parameters."""
    folder.mkdir()
    run = cluster(folder, settings)
    run.start()
    for index in range(settings.servers * settings.replicas):
        run.server(index, f"standby{index}")
    lock, seen = threading.Lock(), list[Any]()

    def strike(module: nn.Module, task: TrainTask) -> float:
        with lock:
            if task.step > 20 and not struck.is_set():
                struck.set()
                run.kill(run.servers[0])
                if not settings.replicas:
                    run.server(0)
        return share_gradient(module, task)

    for worker in range(2):
        run.work(worker, model(), strike, 0.01, seen)
    run.stop()
    values: torch.Tensor = seen[-1][1]
    return values


def share_gradient(module: nn.Module, task: TrainTask) -> float:
    """The gradient of a share of a step's batch."""
    inputs = torch.randn(4, 5, generator=torch.Generator().manual_seed(task.step))[task.share :: task.shares]
    loss = module(inputs).square().sum() / 4
    loss.backward()
    return float(loss.detach())


@pytest.mark.parametrize("replicas", [0, 1])
def test_a_server_that_dies_in_synchronous_mode_changes_nothing(tmp_path: Path, replicas: int) -> None:
    settings = ServerSettings("sync", servers=2, replicas=replicas, snapshot_every=5, chunk_kb=4)
    undisturbed = threading.Event()
    undisturbed.set()
    wanted = struck_sync(tmp_path / "whole", ServerSettings("sync", servers=2, chunk_kb=4), undisturbed)
    got = struck_sync(tmp_path / "struck", settings, struck := threading.Event())
    assert struck.is_set()
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)  # float32 sums in another order
    if not replicas:
        assert events(tmp_path / "struck")["server_settled"]["lost"] == 0


def test_a_worker_and_then_a_server_die_in_synchronous_mode(tmp_path: Path) -> None:
    run = cluster(tmp_path, ServerSettings("sync", snapshot_every=1000))
    run.start()
    seen: list[Any] = []
    pushed, vanished, struck = threading.Event(), threading.Event(), threading.Event()

    def vanish(module: nn.Module, task: TrainTask) -> float:
        if task.step > 0:
            pushed.set()
        if task.step > 10:
            vanished.set()
            raise Walks
        return share_gradient(module, task)

    def strike(module: nn.Module, task: TrainTask) -> float:
        if task.step > 20 and not struck.is_set():
            struck.set()
            run.kill(run.servers[0])
            run.server(0)
        return share_gradient(module, task)

    run.work(1, model(), vanish, 0.01, seen)
    assert pushed.wait(20)  # so that there is something that nobody can push again
    run.work(0, model(), strike, 0.01, seen)
    run.stop(expect=(Walks,))
    assert vanished.is_set() and struck.is_set()
    assert len({task // 4096 for task in done_tasks(tmp_path)}) == STEPS
    assert events(tmp_path)["server_settled"]["lost"] > 0  # what the dead worker alone could have pushed again


def test_standby_holds_what_its_primary_held(tmp_path: Path) -> None:
    run = cluster(tmp_path, ServerSettings("async", replicas=1, compensation="adaptive"))
    run.start()
    standby = run.server(0, "standby0")
    seen: list[Any] = []
    for worker in range(2):
        run.work(worker, model(), gradient, 0.01, seen)
    run.stop()
    for index, store in run.servers[0].state.stores.items():
        assert torch.equal(store.value, standby.state.stores[index].value)
        assert standby.state.stores[index].version == store.version
