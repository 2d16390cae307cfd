"""`ps(mode=sync)` and `ps(mode=ssp, staleness=0)` take the steps of one process that sees the whole batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from echelon.sync.server.scheduler import Plan
from echelon.sync.server.settings import Settings
from tests.ranks.server.roles import Cluster, Optimizer

STEPS, BATCH, LR = 12, 12, 0.002
OPTIMIZERS: dict[str, Optimizer] = {
    "sgd": lambda tensors: torch.optim.SGD(tensors, lr=LR),
    "momentum": lambda tensors: torch.optim.SGD(tensors, lr=LR, momentum=0.9, nesterov=True),
    "adam": lambda tensors: torch.optim.Adam(tensors, lr=LR, fused=True),
}


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 300), nn.Tanh(), nn.Linear(300, 3)).double()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return (
        torch.randn(BATCH, 7, generator=generator, dtype=torch.float64),
        torch.randn(BATCH, 3, generator=generator, dtype=torch.float64),
    )


def share_gradient(module: nn.Module, task: dict[str, Any]) -> float:
    inputs, targets = batch(task["step"])
    rows = slice(task["share"], None, task["shares"])
    loss = ((module(inputs[rows]) - targets[rows]) ** 2).sum() / BATCH
    loss.backward()
    return float(loss.detach())


def alone(optimizer: Optimizer) -> torch.Tensor:
    module = model()
    stepper = optimizer(list(module.parameters()))
    for step in range(STEPS):
        stepper.zero_grad()
        share_gradient(module, {"step": step, "share": 0, "shares": 1})
        stepper.step()
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("settings", [Settings("sync", servers=2, chunk_kb=4), Settings("ssp", staleness=0)], ids=str)
def test_sync_follows_one_process(tmp_path: Path, name: str, settings: Settings) -> None:
    cluster = Cluster(tmp_path, settings, OPTIMIZERS[name], Plan(1, STEPS, 0, None, None))
    cluster.start()
    seen: list[Any] = []
    for worker in range(2):
        cluster.work(worker, model(), share_gradient, LR, seen)
    cluster.stop()
    torch.testing.assert_close(seen[-1][1], alone(OPTIMIZERS[name]), atol=1e-9, rtol=0)
