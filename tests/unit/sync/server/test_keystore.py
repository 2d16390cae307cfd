"""One key on its server: its moving average, and optimizers stepped without torch's wrappers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from echelon.sync.server.keystore import KeyStore, Push
from echelon.sync.server.settings import Settings
from echelon.sync.server.table import Cut, ParameterInfo, cut_table
from echelon.train.optim import EMA

TABLE = cut_table([ParameterInfo("w", (6,), True)], Cut(1, 4096))


def store(settings: Settings, optimizer: Any = torch.optim.SGD) -> KeyStore:
    return KeyStore(TABLE.keys[0], torch.arange(6.0), settings, lambda tensors, decay: optimizer(tensors, lr=0.1))


def push(task: int) -> Push:
    generator = torch.Generator().manual_seed(task)
    return Push("worker0", task, task, 0, 1, 1, 0, 0.1, 1, torch.randn(6, generator=generator))


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_average_is_that_of_the_training_loop(mode: str) -> None:
    key = store(Settings(mode, ema=0.9))
    model = nn.Linear(6, 1, bias=False)
    model.weight.data = torch.arange(6.0)[None]
    wanted = EMA(model, 0.9)
    again = store(Settings(mode, ema=0.9))
    for task in range(20):
        key.take(push(task))
        model.weight.data = key.value[None].clone()
        wanted.update(model)
        if task == 10:
            again.load_state(key.state(full=True))
        elif task > 10:
            again.take(push(task))
    average = wanted.state_dict()["average"]["weight"][0]
    torch.testing.assert_close(key.state(full=False)["average"], average)
    torch.testing.assert_close(again.state(full=False)["average"], average)
    assert again.averaged == 20


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad])
def test_any_optimizer_takes_its_usual_steps(optimizer: Any) -> None:
    key = store(Settings(), optimizer)
    parameter = nn.Parameter(torch.arange(6.0)[None].clone())
    usual = optimizer([parameter], lr=0.1)
    for task in range(5):
        key.take(push(task))
        parameter.grad = push(task).gradient[None]
        usual.step()
    torch.testing.assert_close(key.value, parameter.detach()[0])


def test_a_key_that_catches_up_also_completes_what_came_meanwhile() -> None:
    key = store(Settings("sync"))
    for task in (3, 4):  # 0 to 2 died with the worker that computed them; 4 came before the word to catch up to 4
        key.take(push(task))
    assert key.version == 0
    assert key.catch_up(4) == 3
    assert key.version == 5
