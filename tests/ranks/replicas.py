"""A tiny training loop around a `Sync` alone: the model, the data and each rank's part are functions of the step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.checkpoint.tree import flatten, unflatten
from echelon.collectives import registry as paths
from echelon.compression import read as read_codec
from echelon.core.state_tree import StateView
from echelon.observe.phases import HostClock
from echelon.optim.build import EMA
from echelon.sync.base import SyncContext
from echelon.sync.registry import read as read_sync
from echelon.trainer.state import (
    Cursor,
    RunParts,
    agreed_state,
    layout_of,
    load_rank_state,
    load_shared_state,
    rank_state,
)
from echelon.trainer.step import warmup_backward
from echelon.trainer.update import Update
from echelon.trainer.world import World
from tests.ranks.spawn import Rank

SIZES = (7, 8, 6, 1)
"""Samples of the global batches, over and over: uneven parts, and a tail that leaves ranks without any."""
FEATURES = 33


class Net(nn.Module):
    """A matrix that goes through a codec, BatchNorm with statistics and a counter, a small layer; float64."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(FEATURES, 32, dtype=torch.float64)
        self.norm = nn.BatchNorm1d(32, dtype=torch.float64)
        self.last = nn.Linear(32, 1, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        if len(x) > 1:  # one sample has no variance
            h = self.norm(h)
        return self.last(torch.tanh(h)).square().sum()


class Quadratic(nn.Module):
    """loss_i = |w - t_i|^2 / 2, whose gradient NumPy can follow: the mean is w - mean(t)."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.full((FEATURES, 32), 2.0, dtype=torch.float64))  # goes through the codec
        self.b = nn.Parameter(torch.full((32,), 1.0, dtype=torch.float64))  # travels whole

    def forward(self, x: Tensor) -> Tensor:
        a = (self.a - x[:, :1, None]).square().sum(dim=(1, 2)) / 2
        return (a + (self.b - x[:, 1:2]).square().sum(1) / 2).sum()

    @staticmethod
    def optimum(x: Tensor) -> Tensor:
        """Return the `a` of least loss for a batch."""
        return x[:, :1].mean(0)


class ChannelsLast(nn.Module):
    """The same loss with other targets for every element of a weight [32, 3, 11, 1] that is stored channels last."""

    def __init__(self) -> None:
        super().__init__()
        weight = torch.full((32, 3, FEATURES // 3, 1), 2.0, dtype=torch.float64)
        self.a = nn.Parameter(weight.contiguous(memory_format=torch.channels_last))

    def forward(self, x: Tensor) -> Tensor:
        return (self.a - self._targets(x)).square().sum() / 2

    @staticmethod
    def _targets(x: Tensor) -> Tensor:
        scales = torch.arange(1, 33, dtype=x.dtype) / 32
        return scales.view(1, -1, 1, 1, 1) * x.view(len(x), 1, 3, FEATURES // 3, 1)

    @staticmethod
    def optimum(x: Tensor) -> Tensor:
        """Return the `a` of least loss for a batch."""
        return ChannelsLast._targets(x).mean(0)


def targets(step: int) -> np.ndarray:
    """Return the inputs `(samples, FEATURES)` of the global batch of a step, from 0."""
    return np.random.default_rng(step).normal(size=(SIZES[step % len(SIZES)], FEATURES))


def part(step: int, rank: int, size: int) -> np.ndarray:
    """Return a rank's contiguous part of a batch; it may be empty."""
    return np.array_split(targets(step), size)[rank]


@dataclass(frozen=True)
class Trial:
    """What is trained."""

    sync: str
    compression: str = "none"
    collective: str = "backend"
    model: Callable[[], nn.Module] = Net
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.SGD
    lr: float = 0.05
    momentum: float = 0.0
    ema: bool = False
    steps: int = 0  # of the run; 0: not known
    growth: int = 0  # steps after which a loss scale doubles; 0: losses are not scaled
    survives: bool = False  # a single rank has a group, as the last one of a run has


def make_parts(trial: Trial) -> RunParts:
    """Build model, optimizer and strategy for this rank."""
    torch.manual_seed(0)
    model = trial.model()
    extra = {"momentum": trial.momentum} if trial.momentum else {}
    optimizer = trial.optimizer(model.parameters(), lr=trial.lr, **extra)
    scaler = torch.amp.GradScaler("cpu", 8.0, growth_interval=max(1, trial.growth), enabled=trial.growth > 0)
    alone = dist.get_world_size() == 1 and not trial.survives
    context = SyncContext(
        model=model,
        update=Update(model, optimizer, scaler, 0.0),
        optimizer=optimizer,
        group=None if alone else dist.group.WORLD,
        device=torch.device("cpu"),
        compression=read_codec(trial.compression),
        path=paths.build(trial.collective),
        seed=3,
        clock=HostClock(),
        loss_scale=scaler.get_scale,
        steps=trial.steps,
    )
    sync = read_sync(trial.sync).build(context)
    if sync.needs_warmup_backward:
        warmup_backward(sync, torch.zeros(2, FEATURES, dtype=torch.float64))
    return RunParts(model, optimizer, scaler, EMA(model, 0.9) if trial.ema else None, sync)


def train(parts: RunParts, rank: Rank, first: int, last: int) -> list[dict[str, Tensor]]:
    """Take the steps from `first` to `last`, exclusive; returns the model's state after each."""
    seen = []
    for step in range(first, last):
        x = torch.from_numpy(part(step, rank.index, rank.world_size))
        divisor = parts.sync.begin_step(len(x), len(targets(step)))
        with parts.sync.micro_batch(last=True):
            blank = sum(p.sum() for p in parts.model.parameters()) * 0.0
            loss = parts.sync.module(x) / divisor if len(x) else parts.sync.module(torch.zeros(1, FEATURES).double())
            parts.scaler.scale(loss * (1.0 if len(x) else 0.0) + blank).backward()
        parts.sync.step()
        if parts.ema:
            parts.ema.update(parts.model)
        seen.append(copy(parts.model.state_dict()))
    return seen


def copy(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return copies of tensors by name."""
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


def world_of(rank: Rank) -> World:
    """Return this rank as the loop sees it."""
    group = None if rank.world_size == 1 else dist.group.WORLD
    return World(rank.index, rank.world_size, rank.index, torch.device("cpu"), group)


def save(parts: RunParts, rank: Rank, step: int) -> tuple[StateView, StateView]:
    """Return shared and own state as a checkpoint would hold them."""
    own = _through_checkpoint(rank_state(parts, world_of(rank)))
    with agreed_state(parts, Cursor(step=step)) as state:
        return _through_checkpoint(state), own


def load(parts: RunParts, rank: Rank, saved: tuple[StateView, StateView]) -> None:
    """Restore on the same number of ranks."""
    load_shared_state(parts, saved[0])
    load_rank_state(parts, world_of(rank), layout_of(world_of(rank)), {rank.index: saved[1]})


def _through_checkpoint(state: StateView) -> StateView:
    tree, tensors = flatten(state)
    restored: StateView = unflatten(tree, copy(tensors))
    return restored
