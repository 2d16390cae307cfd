"""A worker's parameters and the keys' values: the same elements, however they lie in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from echelon.core.errors import UserError
from echelon.observe.phases import HostClock
from echelon.ps.client import Client, PushInfo
from echelon.ps.momentum import SgdTerms
from echelon.ps.spans import model_table
from echelon.ps.strategy import ParameterServer, WorkerOptions
from echelon.ps.table import Cut, KeyRange
from echelon.sync.ps import ServerSettings


def test_values_are_those_of_the_elements_in_channels_last_too() -> None:
    """A key that ends inside a parameter, and parameters whose memory has another order than their elements."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)).to(memory_format=torch.channels_last)
    table = model_table(model, Cut(servers=2, chunk_bytes=400))
    server = ParameterServer(model, table, cast(Client, None), WorkerOptions(ServerSettings(), 0.0, HostClock()))
    before = [p.detach().clone() for p in model.parameters()]
    values = server.key_values()
    assert torch.equal(torch.cat([values[k.index] for k in table.keys]), torch.cat([p.reshape(-1) for p in before]))
    server.set_parameters({index: 2 * value for index, value in values.items()})
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, 2 * old)
    assert next(model.parameters()).is_contiguous(memory_format=torch.channels_last)


class Pushes:
    """What a worker pushes, by key: the gradient, and the parts that have none."""

    def __init__(self) -> None:
        self.by_key: dict[int, tuple[Tensor, list[int]]] = {}

    def open_task(self, task: int, pushes: int) -> None:
        """Announce a task."""
        self.by_key.clear()

    def push(self, key: KeyRange, gradient: Tensor, info: PushInfo, absent: Sequence[int] = ()) -> None:
        """Take a push, as one that leaves at once."""
        assert key.index not in self.by_key
        self.by_key[key.index] = gradient.clone(), list(absent)


class Shared(nn.Module):
    """A layer that is used several times, under checkpointing of either kind, or once without."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.first, self.shared, self.reentrant, self.times = nn.Linear(4, 4), nn.Linear(4, 4), reentrant, 3

    def forward(self, x: Tensor) -> Tensor:
        """Return `(B, 4)` of `(B, 4)`."""
        x = self.first(x)
        for _ in range(self.times):
            x = checkpoint(self.shared, x, use_reentrant=self.reentrant).tanh()
        return x


def worker(model: nn.Module, chunk_bytes: int, momentum: SgdTerms | None = None) -> tuple[ParameterServer, Pushes]:
    """Return a worker's strategy of async mode, and what it pushes."""
    pushes, table = Pushes(), model_table(model, Cut(1, chunk_bytes))
    options = WorkerOptions(ServerSettings(), 0.0, HostClock(), reads_ahead=True, momentum=momentum)
    return ParameterServer(model, table, cast(Client, pushes), options), pushes


def backward(worker: ParameterServer, task: int) -> list[Tensor]:
    """Do a task up to the end of backward, without values of servers; returns the whole gradient."""
    worker.begin(PushInfo(task, task, 0, 1, 2, 2, 0.1))
    with worker.micro_batch(True):
        worker.held(torch.ones(2, 4)).sum().backward()
    return [p.grad.reshape(-1).clone() for p in worker.held.parameters() if p.grad is not None]


@pytest.mark.parametrize("reentrant", [False, True])
def test_the_gradient_of_what_is_shared_is_pushed_once_and_whole(reentrant: bool) -> None:
    """Under reentrant checkpointing it comes in pieces; all else leaves in backward from the second step on."""
    torch.manual_seed(0)
    model = Shared(reentrant)
    strategy, pushes = worker(model, 64)
    early = []
    for task in range(3):
        expected = torch.cat(backward(strategy, task))
        early.append(len(pushes.by_key))
        strategy.step()
        pushed = torch.cat([pushes.by_key[index][0] for index in sorted(pushes.by_key)])
        torch.testing.assert_close(pushed, expected)
    assert early[0] == 0 and 0 < early[1] == early[2]
    assert (early[1] < len(pushes.by_key)) is reentrant


def test_more_of_a_gradient_that_has_left_is_no_silent_loss() -> None:
    model = Shared(reentrant=True)
    model.times = 1
    strategy, _ = worker(model, 64)
    backward(strategy, 0)
    strategy.step()
    model.times = 2
    with pytest.raises(UserError, match=r"shared.* got more of its gradient .*use_reentrant=False"):
        backward(strategy, 1)


@pytest.mark.parametrize("momentum", [None, SgdTerms(0.9, False, 0.0, 3)])
def test_a_part_of_several_parameters_without_gradients_is_absent(momentum: SgdTerms | None) -> None:
    """Weight and bias of a normalisation are one part: a lease that is left out moves neither."""
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 4))
    strategy, pushes = worker(model, 1 << 20, momentum)
    (key,) = {span.key.index: span.key for span in strategy._spans}.values()
    assert len(key.parts) < len(list(model.parameters()))
    backward(strategy, 0)
    strategy.step()
    assert pushes.by_key[0][1] == []
    strategy.begin(PushInfo(1, 1, 0, 1, 2, 2, 0.1))
    strategy.leave_out()
    gradient, absent = pushes.by_key[0]
    assert absent == list(range(len(key.parts))) and not gradient.any()
    strategy.begin(PushInfo(2, 2, 0, 1, 2, 2, 0.1))
    first = next(model.parameters())
    first.grad = torch.ones_like(first)
    strategy.step()
    assert pushes.by_key[0][1] == [i for i, part in enumerate(key.parts) if part.start >= first.numel()]


def test_a_part_without_samples_leaves_a_worker_its_momentum() -> None:
    model = nn.Linear(4, 4)
    strategy, pushes = worker(model, 1 << 20, SgdTerms(0.5, False, 0.0))
    moved = []
    for task, units in enumerate((2, 0, 2)):
        strategy.begin(PushInfo(task, task, 0, 2, units, 4, 0.1))
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, float(units > 0))
        strategy.step()
        moved.append(float(pushes.by_key[0][0].max()))
    assert moved == [1.0, 0.0, 1.5]
