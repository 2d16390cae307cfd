"""Law 2, same run: stopped anywhere and resumed, the parameters are bit-identical, whatever the optimizer."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn, optim

from echelon.checkpoint import CheckpointStore
from echelon.core.state_tree import StateView
from tests.unit.checkpoint.states import assert_same

STEPS = 6
OPTIMIZERS: dict[str, Callable[[Any], optim.Optimizer]] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4),
    "adamw": lambda p: optim.AdamW(p, lr=0.01, amsgrad=True),
    "adagrad": lambda p: optim.Adagrad(p, lr=0.01),
    "rmsprop": lambda p: optim.RMSprop(p, lr=0.01, centered=True),
    "adafactor": lambda p: optim.Adafactor(p, lr=0.01),
}


class Run:
    """A small run with all that changes as it goes: BatchNorm, dropout, a schedule, a scaler, three generators."""

    def __init__(self, optimizer: str) -> None:
        torch.manual_seed(0)
        random.seed(0)
        self.step = 0
        layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.3), nn.Flatten(), nn.Linear(4 * 16, 5)]
        self.model = nn.Sequential(*layers).to(memory_format=torch.channels_last)
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        self.schedule = optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        self.data = torch.Generator().manual_seed(5)

    def go_to(self, step: int) -> None:
        while self.step < step:
            self.optimizer.zero_grad()
            x = torch.randn(8, 3, 6, 6, generator=self.data) * (1 + random.random())
            self.scaler.scale(self.model(x).square().mean()).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.schedule.step()
            self.step += 1

    def state(self) -> dict[str, Any]:
        generators = {"torch": torch.get_rng_state(), "python": random.getstate(), "data": self.data.get_state()}
        parts = {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule, "scaler": self.scaler}
        return {name: part.state_dict() for name, part in parts.items()} | {"rng": generators}

    def restore(self, step: int, state: StateView) -> None:
        self.step = step
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.schedule.load_state_dict(state["schedule"])
        self.scaler.load_state_dict(state["scaler"])
        torch.set_rng_state(state["rng"]["torch"])
        random.setstate(state["rng"]["python"])
        self.data.set_state(state["rng"]["data"])


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_resumed_anywhere_is_the_same_run(optimizer: str, tmp_path: Path) -> None:
    whole = Run(optimizer)
    whole.go_to(STEPS)
    expected = dict(whole.state())
    for stop in range(STEPS):
        store = CheckpointStore(tmp_path / str(stop), keep=1)
        first = Run(optimizer)
        first.go_to(stop)
        store.save(stop, first.state())
        first.go_to(STEPS)  # goes on while the checkpoint is written
        store.close()
        second = Run(optimizer)
        newest = store.newest()
        assert newest is not None
        second.restore(*newest)
        second.go_to(STEPS)
        assert_same(plain(expected), plain(second.state()))


def plain(state: Any) -> Any:
    """Return the state with plain dicts, as a checkpoint gives them back."""
    return {key: plain(value) for key, value in state.items()} if isinstance(state, dict) else state
