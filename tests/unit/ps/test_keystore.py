"""One key on its server: its moving average, and optimizers stepped without torch's wrappers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import zmq
from timm.optim import Adan
from torch import nn

from echelon.optim.build import EMA
from echelon.ps.blob import message_of
from echelon.ps.copies import ServersCopy
from echelon.ps.keystore import KeyStore, Push, PushOutcome
from echelon.ps.table import Cut, ParameterInfo, cut_table
from echelon.sync.ps import ServerSettings

TABLE = cut_table([ParameterInfo("w", (6,), True)], Cut(1, 4096))


def in_message(task: int) -> tuple[Push, zmq.Frame]:
    """Return a push whose gradient lies in a message's memory."""
    sent = push(task)
    message = zmq.Frame(sent.gradient.numpy().tobytes(), copy=True)
    gradient = torch.frombuffer(message.buffer, dtype=torch.float32)
    assert message_of(message.buffer, gradient) is message
    return sent._replace(gradient=gradient, memory=message), message


def store(settings: ServerSettings, optimizer: Any = torch.optim.SGD) -> KeyStore:
    return KeyStore(TABLE.keys[0], torch.arange(6.0), settings, lambda tensors, decay: optimizer(tensors, lr=0.1))


def push(task: int) -> Push:
    generator = torch.Generator().manual_seed(task)
    return Push("worker0", task, task, 0, 1, 1, 0, 0.1, 1, torch.randn(6, generator=generator))


def test_rates_of_layers_leave_the_message_as_it_came() -> None:
    """A standby is sent the same message."""
    table = cut_table([ParameterInfo("w", (6,), True, rate=0.5)], Cut(1, 4096))
    make = lambda tensors, decay: torch.optim.SGD(tensors, lr=0.1)  # noqa: E731
    key = KeyStore(table.keys[0], torch.zeros(6), ServerSettings(), make)
    sent = push(0)
    before = sent.gradient.clone()
    key.take(sent)
    assert torch.equal(sent.gradient, before)
    torch.testing.assert_close(key.value, -0.05 * before)


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_average_is_that_of_the_training_loop(mode: str) -> None:
    key = store(ServerSettings(mode, ema=0.9))
    model = nn.Linear(6, 1, bias=False)
    model.weight.data = torch.arange(6.0)[None]
    wanted = EMA(model, 0.9)
    again = store(ServerSettings(mode, ema=0.9))
    for task in range(20):
        key.take(push(task))
        model.weight.data = key.value[None].clone()
        wanted.update(model)
        if task == 10:
            again.load_state(key.state(full=True), 0.0)
        elif task > 10:
            again.take(push(task))
    average = wanted.state_dict()["average"]["weight"][0]
    torch.testing.assert_close(key.state(full=False)["average"], average)
    torch.testing.assert_close(again.state(full=False)["average"], average)
    assert again.averaged == 20


def test_average_of_narrow_values_moves() -> None:
    cut = cut_table([ParameterInfo("w", (6,), True)], Cut(1, 4096, dtype="bfloat16"))
    make = lambda tensors, decay: torch.optim.SGD(tensors, lr=0.1)  # noqa: E731
    key = KeyStore(cut.keys[0], torch.ones(6, dtype=torch.bfloat16), ServerSettings(ema=0.999), make)
    key.averaged, key.value = 100_000, torch.full((6,), 1.5, dtype=torch.bfloat16)
    for task in range(100):
        key.take(push(task)._replace(gradient=torch.zeros(6, dtype=torch.bfloat16)))
    assert bool((key.state(full=False)["average"] > 1.04).all())


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop, torch.optim.Adagrad])
def test_any_optimizer_takes_its_usual_steps(optimizer: Any) -> None:
    key = store(ServerSettings(), optimizer)
    parameter = nn.Parameter(torch.arange(6.0)[None].clone())
    usual = optimizer([parameter], lr=0.1)
    for task in range(5):
        key.take(push(task))
        parameter.grad = push(task).gradient[None]
        usual.step()
    torch.testing.assert_close(key.value, parameter.detach()[0])


def test_an_optimizer_that_counts_steps_in_its_group_goes_on_where_it_was() -> None:
    key, again = store(ServerSettings(), Adan), store(ServerSettings(), Adan)
    for task in range(20):
        key.take(push(task))
    saved = key.state(full=True)
    again.load_state(saved, 0.0)
    for each in (key, again):
        each.take(push(20))
    assert torch.equal(key.value, again.value)
    store(ServerSettings(), Adan).load_state({k: v for k, v in saved.items() if k != "groups"}, 0.0)  # saved before


def test_a_key_that_catches_up_also_completes_what_came_meanwhile() -> None:
    key = store(ServerSettings("sync"))
    for task in (3, 4):  # 0 to 2 died with the worker that computed them; 4 came before the word to catch up to 4
        key.take(push(task))
    assert key.version == 0
    assert key.catch_up(4) == 3
    assert key.version == 5


def test_plain_sgd_writes_the_value_into_the_gradients_message_and_leaves_what_was_sent() -> None:
    key, usual = store(ServerSettings()), store(ServerSettings())
    before = None
    for task in range(4):
        given, message = in_message(task)
        key.take(given)
        usual.take(push(task))
        assert key.memory is message
        assert bytes(message.buffer) == key.value.numpy().tobytes()
        torch.testing.assert_close(key.value, usual.value)
        if before is not None:
            assert bytes(before[0].buffer) == before[1]
        before = message, bytes(message.buffer)
    sent = message.bytes
    key.take(push(4))  # not in a message: the value moves out of the one that may be on its way
    usual.take(push(4))
    assert key.memory is None and message.bytes == sent
    torch.testing.assert_close(key.value, usual.value)
    key.load_state(usual.state(full=True), 0.0)
    torch.testing.assert_close(key.value, usual.value)


@pytest.mark.parametrize("extra", [{"momentum": 0.9}, {"weight_decay": 0.1}, {"maximize": True}])
def test_other_forms_of_sgd_keep_the_value_to_themselves(extra: dict[str, Any]) -> None:
    key = store(ServerSettings(), lambda tensors, lr: torch.optim.SGD(tensors, lr, **extra))
    parameter = nn.Parameter(torch.arange(6.0)[None].clone())
    usual = torch.optim.SGD([parameter], 0.1, **extra)
    for task in range(4):
        key.take(in_message(task)[0])
        parameter.grad = push(task).gradient[None]
        usual.step()
    assert key.memory is None
    torch.testing.assert_close(key.value, parameter.detach()[0])


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_a_part_without_samples_counts_and_updates_nothing(optimizer: Any) -> None:
    key, usual = store(ServerSettings(ema=0.9), optimizer), store(ServerSettings(ema=0.9), optimizer)
    for task in range(4):
        key.take(push(2 * task)._replace(units=2, batch=4))
        usual.take(push(2 * task)._replace(units=2, batch=4))
        empty = push(2 * task + 1)._replace(units=0, batch=4, gradient=torch.zeros(6), lr=0.0)
        assert key.take(empty) is PushOutcome.APPLIED and key.take(empty) is PushOutcome.DUPLICATE
    assert key.average is not None and usual.average is not None
    assert torch.equal(key.value, usual.value) and torch.equal(key.average, usual.average)
    assert key.averaged == usual.averaged == key.version == 4


@pytest.mark.parametrize("watermark", [0, 1])
def test_a_state_has_its_tasks_as_runs_and_one_that_lists_them_is_read(watermark: int) -> None:
    key = store(ServerSettings())
    for task in (0, 1, 2, 5):
        key.take(push(task))
    key.applied.raise_to(watermark)
    state = key.state(full=True)
    assert state["task_runs"] == [watermark, 2, 5, 5]
    old = {name: value for name, value in state.items() if name != "task_runs"} | {"tasks": [*range(watermark, 3), 5]}
    for each in (state, old):
        again = store(ServerSettings())
        again.load_state(each, 0.0)
        assert again.applied == key.applied
        assert ServersCopy({0: each}, torch.empty(0)).counted() == (3, {5})


@pytest.mark.parametrize("mode", ["async", "sync"])
def test_what_no_push_has_a_gradient_of_stays(mode: str) -> None:
    """Neither momentum nor weight decay moves it, until a push has one; a version has what any of its shares has."""

    def made(tensors: Any, decay: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(tensors, lr=0.1, momentum=0.9, weight_decay=0.1)

    key = KeyStore(TABLE.keys[0], torch.arange(6.0), ServerSettings(mode), made)
    nothing = frozenset(range(len(TABLE.keys[0].parts)))
    key.take(push(0))
    moved = key.value.clone()
    key.take(push(1)._replace(absent=nothing, gradient=torch.zeros(6)))
    assert torch.equal(key.value, moved) and key.version == 2
    if mode == "sync":
        key.take(push(2)._replace(absent=nothing, gradient=torch.zeros(6), shares=2))
        again = KeyStore(TABLE.keys[0], torch.arange(6.0), ServerSettings(mode), made)
        again.load_state(key.whole_state(), 0.0)
        for each in (key, again):
            each.take(push(2)._replace(share=1, shares=2))
            assert each.version == 3 and not torch.equal(each.value, moved)
    else:
        key.take(push(2))
        assert not torch.equal(key.value, moved)
