"""Rows of tables under `ps(...)`: one asynchronous worker is one process, and what travels is touched rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from echelon.coordinator.config import TrainingPlan
from echelon.coordinator.messages import TrainTask
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
        out: Tensor = self.dense(self.items(ids)) + self.bags(input=ids[:, None]) + self.items(ids.flip(0) // 2)
        return out


def tower() -> Tower:
    torch.manual_seed(0)
    return Tower().double()


def ids_of(step: int) -> Tensor:
    return torch.randint(ROWS, (IDS,), generator=torch.Generator().manual_seed(step))


def adagrad(tensors: Any) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(tensors, lr=LR)


def test_one_asynchronous_worker_is_one_process_and_sends_touched_rows_alone(tmp_path: Path) -> None:
    def gradient(module: nn.Module, task: TrainTask) -> float:
        loss: Tensor = module(ids_of(task.step)).square().sum() / IDS
        loss.backward()
        return float(loss.detach())

    whole = tower()
    optimizer = adagrad(whole.parameters())
    for step in range(STEPS):
        whole(ids_of(step)).square().sum().div(IDS).backward()
        optimizer.step()
        optimizer.zero_grad()
    cluster = Cluster(tmp_path, ServerSettings(servers=2), adagrad, TrainingPlan(1, STEPS, 0, None, None))
    cluster.start()
    seen: list[Any] = []
    cluster.work(0, tower(), gradient, LR, seen)
    cluster.stop()
    flat = torch.cat([p.detach().reshape(-1) for p in whole.parameters()])
    torch.testing.assert_close(seen[-1][1], flat, atol=1e-12, rtol=0)

    item, dense = 8, 8 * (WIDTH * WIDTH + WIDTH)
    touched = 0
    for ids in map(ids_of, range(STEPS)):
        touched += len(torch.cat([ids, ids // 2]).unique()) + len(ids.unique())
    rows = touched * (WIDTH * item + 4)
    wire = sum(window.wire_bytes for window in cluster.windows)
    assert 2 * rows < wire - 2 * STEPS * dense <= 1.2 * 2 * rows
