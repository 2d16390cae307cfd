"""`ps(mode=sync)` and `ps(mode=ssp, staleness=0)` follow `allreduce` step by step, whatever the optimizer."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.collectives.paths.backend import Backend
from echelon.compression import read
from echelon.coordinator.config import TrainingPlan
from echelon.coordinator.messages import TrainTask
from echelon.observe.phases import HostClock
from echelon.sync.allreduce import AllReduceSettings
from echelon.sync.base import SyncContext
from echelon.sync.ps import ServerSettings
from echelon.trainer.update import Update
from tests.ranks.server.roles import Cluster, Optimizer
from tests.ranks.spawn import Rank, run_ranks

STEPS, BATCH, LR = 12, 12, 0.002
OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": lambda tensors: torch.optim.SGD(tensors, lr=LR),
    "momentum": lambda tensors: torch.optim.SGD(tensors, lr=LR, momentum=0.9),
    "nesterov": lambda tensors: torch.optim.SGD(tensors, lr=LR, momentum=0.9, nesterov=True),
    "adam": lambda tensors: torch.optim.Adam(tensors, lr=LR, fused=True),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 300), nn.Tanh(), nn.Linear(300, 3)).double()


def batch(step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return (
        torch.randn(BATCH, 7, generator=generator, dtype=torch.float64),
        torch.randn(BATCH, 3, generator=generator, dtype=torch.float64),
    )


def share_loss(module: nn.Module, step: int, share: int, shares: int) -> Tensor:
    """Return the sum of a share's losses."""
    inputs, wanted = batch(step)
    rows = slice(share, None, shares)
    squares: Tensor = (module(inputs[rows]) - wanted[rows]) ** 2
    return squares.sum()


def flat(module: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


def reduced(rank: Rank, name: str) -> list[Tensor]:
    """Train with `allreduce`; returns the parameters before each step, and at the end."""
    module = model()
    optimizer = OPTIMIZERS[name](list(module.parameters()))
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    update = Update(module, optimizer, scaler, 0.0)
    group, clock = dist.group.WORLD, HostClock()
    sync = AllReduceSettings().build(
        SyncContext(module, update, optimizer, group, torch.device("cpu"), read("none"), Backend(), 0, clock)
    )
    seen = []
    for step in range(STEPS):
        seen.append(flat(module))
        divisor = sync.begin_step(BATCH // rank.world_size, BATCH)
        with sync.micro_batch(last=True):
            (share_loss(sync.module, step, rank.index, rank.world_size) / divisor).backward()
        sync.step()
    return [*seen, flat(module)]


@cache
def trajectory(name: str) -> list[Tensor]:
    seen: list[Tensor] = run_ranks(reduced, 2, name)[0]
    return seen


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize(
    "settings", [ServerSettings("sync", servers=2, chunk_kb=4), ServerSettings("ssp", staleness=0)], ids=str
)
def test_sync_follows_allreduce(tmp_path: Path, name: str, settings: ServerSettings) -> None:
    cluster = Cluster(tmp_path, settings, OPTIMIZERS[name], TrainingPlan(1, STEPS, 0, None, None))
    begun: dict[tuple[int, int], Tensor] = {}

    def gradient(module: nn.Module, task: TrainTask) -> float:
        loss = share_loss(module, task.step, task.share, task.shares) / BATCH
        begun[task.step, task.share] = flat(module)  # forward has loaded the parameters of this step
        loss.backward()
        return float(loss.detach())

    cluster.start()
    seen: list[Any] = []
    for worker in range(2):
        cluster.work(worker, model(), gradient, LR, seen)
    cluster.stop()
    wanted = trajectory(name)
    assert {step for step, _ in begun} == set(range(STEPS))
    for (step, _), values in begun.items():
        torch.testing.assert_close(values, wanted[step], atol=1e-9, rtol=0)
    torch.testing.assert_close(seen[-1][1], wanted[-1], atol=1e-9, rtol=0)
