"""Workers that are several ranks give servers what whole ones give: `ps(mode=sync)` is the same run in any layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from echelon.coordinator.config import TrainingPlan
from echelon.coordinator.messages import TrainTask
from echelon.data.base import Shard
from echelon.data.order import local_part
from echelon.sync.ps import ServerSettings
from tests.ranks.layouts import Trial, loss_sum
from tests.ranks.server.roles import Cluster, Optimizer
from tests.ranks.server.split_worker import TIMEOUT_S, Work4, whole_model, work_split
from tests.ranks.server.test_deaths import done_tasks
from tests.ranks.spawn import run_ranks

pytestmark = pytest.mark.timeout(600)
STEPS, LR = 8, 0.05
LONGEST_S = 4 * TIMEOUT_S  # the scheduler must not give up while ranks start on a busy machine


def momentum(tensors: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(tensors, lr=LR, momentum=0.9)


def trust_ratio(tensors: Any) -> torch.optim.Optimizer:
    from timm.optim import create_optimizer_v2

    return create_optimizer_v2(list(tensors), opt="lars", lr=LR, momentum=0.9)


def cluster(folder: Path, settings: ServerSettings, optimizer: Optimizer, compression: str = "none") -> Cluster:
    folder.mkdir()
    run = Cluster(folder, settings, optimizer, TrainingPlan(1, STEPS, 0, None, None), compression, timeout_s=LONGEST_S)
    run.start()
    return run


def with_whole_workers(folder: Path, settings: ServerSettings, trial: Trial, optimizer: Optimizer) -> Tensor:
    """Train with two whole workers; returns the parameters."""

    def gradient(module: nn.Module, task: TrainTask) -> float:
        inputs, targets = trial.global_batch(task.step)
        own = torch.from_numpy(local_part(np.arange(len(inputs)), Shard(task.share, task.shares)))
        loss = loss_sum(module(inputs[own]), targets[own]) / len(inputs)
        loss.backward()
        return float(loss.detach())

    run = cluster(folder, settings, optimizer)
    seen: list[Any] = []
    for worker in range(2):
        run.work(worker, whole_model(trial), gradient, LR, seen)
    run.stop()
    values: Tensor = seen[-1][1]
    return values


def with_split_workers(
    folder: Path, settings: ServerSettings, trial: Trial, optimizer: Optimizer, compression: str = "none"
) -> Tensor:
    """Train with four ranks, which are two workers; returns the parameters."""
    run = cluster(folder, settings, optimizer, compression)
    work = Work4(trial, settings, run.scheduler.listener.address, folder, LR, compression)
    seen = [values for rank in run_ranks(work_split, 4, work, timeout_s=LONGEST_S) for values in rank]
    run.stop()
    values: Tensor = seen[-1]
    return values


def check_same_run(folder: Path, layouts: list[str], model: str = "vit", optimizer: Optimizer = momentum) -> None:
    folder.mkdir(exist_ok=True)
    settings = ServerSettings("sync", servers=2, chunk_kb=4)
    wanted = with_whole_workers(folder / "whole", settings, Trial(model), optimizer)
    for layout in layouts:
        got = with_split_workers(folder / layout, settings, Trial(model, layout), optimizer)
        torch.testing.assert_close(got, wanted, atol=1e-9, rtol=0, msg=lambda m, at=layout: f"{at}: {m}")


def test_a_pipeline_is_the_same_worker(tmp_path: Path) -> None:
    check_same_run(tmp_path / "runs", ["dp=2,pp=2"])


@pytest.mark.long
def test_split_and_sharded_tensors_are_the_same_worker(tmp_path: Path) -> None:
    check_same_run(tmp_path / "runs", ["dp=2,tp=2", "dp=2,fsdp=2"])


@pytest.mark.slow
def test_tied_weights_and_an_optimizer_that_looks_at_whole_tensors(tmp_path: Path) -> None:
    check_same_run(tmp_path / "gpt", ["dp=2,tp=2", "dp=2,fsdp=2"], "gpt")
    check_same_run(tmp_path / "lars", ["dp=2,tp=2", "dp=2,fsdp=2"], "vit", trust_ratio)


@pytest.mark.slow
@pytest.mark.parametrize("compression", ["none", "int8", "topk(density=0.1)", "powersgd(rank=2)"])
@pytest.mark.parametrize(
    "settings", [ServerSettings("async", servers=2), ServerSettings("ssp", staleness=1)], ids=lambda s: s.mode
)
def test_every_batch_once_whatever_the_codec(tmp_path: Path, settings: ServerSettings, compression: str) -> None:
    values = with_split_workers(tmp_path / "run", settings, Trial("vit", "dp=2,pp=2"), momentum, compression)
    assert torch.isfinite(values).all()
    assert set(done_tasks(tmp_path / "run")) == set(range(STEPS))
