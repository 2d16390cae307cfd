"""What a rank returns to when a step is begun again: generators and buffers of before it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from echelon.trainer.commit import Draws, KeptDraws
from echelon.trainer.generators import Generators


def _run(model: nn.Module) -> Any:
    return SimpleNamespace(parts=SimpleNamespace(local_model=model, sync=SimpleNamespace(steps_together=True)))


@pytest.mark.parametrize("in_place", [True, False])
def test_generators_and_buffers_go_back_to_the_newest_copy(in_place: bool) -> None:
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Dropout())
    run, kept = _run(model), KeptDraws(model) if in_place else None
    for _ in range(2):  # the second copy is written over the first one
        model(torch.randn(4, 3))
        draws = Draws.of(run, kept)
        before = [buffer.clone() for buffer in model.buffers()]
        drawn = torch.rand(1).item(), random.random(), np.random.rand()
        model(torch.randn(4, 3))
        assert any(not torch.equal(a, b) for a, b in zip(model.buffers(), before, strict=True))
        draws.restore(run)
        assert all(torch.equal(a, b) for a, b in zip(model.buffers(), before, strict=True))
        assert drawn == (torch.rand(1).item(), random.random(), np.random.rand())


class _Assigning(nn.Module):
    """Assigns a buffer anew in each pass, one of another shape, and others for the first time."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("cache", torch.zeros(1))
        self.register_buffer("lazy", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Count passes."""
        self.seen = self.seen + 1
        self.cache = torch.cat([self.cache, self.seen[None]])
        if self.seen == 2:
            self.register_buffer("late", torch.ones(2))
        if self.seen == 3:
            self.lazy = torch.ones(3)
        return x


@pytest.mark.parametrize("in_place", [True, False])
def test_buffers_that_are_assigned_anew_go_back_too(in_place: bool) -> None:
    model = nn.Sequential(_Assigning(), nn.BatchNorm1d(3))
    run, kept = _run(model), KeptDraws(model) if in_place else None
    for _ in range(4):
        draws, before = Draws.of(run, kept), dict(model.named_buffers())
        values = {name: buffer.clone() for name, buffer in before.items()}
        model(torch.randn(4, 3))
        draws.restore(run)
        after = dict(model.named_buffers())
        assert after.keys() == before.keys() and all(after[name] is before[name] for name in before)
        assert all(torch.equal(buffer, values[name]) for name, buffer in after.items())
        model(torch.randn(4, 3))  # the step is done again
    assert model.get_buffer("0.lazy").shape == (3,) and model.get_buffer("0.cache").tolist() == [0, 1, 2, 3, 4]


def test_a_model_without_buffers_has_nothing_to_copy() -> None:
    assert KeptDraws(nn.Linear(2, 2)).take().buffers == []


@pytest.fixture
def own_numpy() -> Iterator[None]:
    bits, state = np.random.get_bit_generator(), np.random.get_state()  # type: ignore[attr-defined]
    yield
    np.random.set_bit_generator(bits)  # type: ignore[attr-defined]
    np.random.set_state(state)


@pytest.mark.parametrize(
    "drawn",
    [
        [np.random.rand, np.random.rand],
        [np.random.randn, np.random.randn, np.random.randn, np.random.rand],  # every second normal is a kept one
        [lambda: None, lambda: np.random.seed(3), lambda: None],
        [lambda: np.random.set_bit_generator(np.random.PCG64(1)), np.random.rand],  # type: ignore[attr-defined]
        [lambda: np.random.set_bit_generator(np.random.MT19937(1)), np.random.rand],  # type: ignore[attr-defined]
        [lambda: np.random.bytes(4 * 624 * 3), lambda: None],  # it moves by whole rounds
    ],
    ids=["uniform", "normal", "seeded", "another kind", "another one", "rounds"],
)
def test_the_state_of_numpy_is_read_again_when_it_has_moved(drawn: list[Callable[[], object]], own_numpy: None) -> None:
    np.random.seed(5)
    kept, run = KeptDraws(nn.Linear(2, 2)), _run(nn.Linear(2, 2))
    for draw in drawn:
        draw()
        draws = Draws.of(run, kept)
        following = np.random.randn(), np.random.rand()
        draws.restore(run)
        assert following == (np.random.randn(), np.random.rand())
        draws.restore(run)


@pytest.mark.parametrize(
    "drawn",
    [
        [random.random, random.random, lambda: None],
        [lambda: random.gauss(0.0, 1.0), lambda: random.gauss(0.0, 1.0), random.random],  # every second one is kept
        [lambda: None, lambda: random.seed(3), lambda: None],
        [lambda: random.randbytes(4 * 624 * 3), lambda: None],  # it moves by whole rounds
    ],
    ids=["uniform", "normal", "seeded", "rounds"],
)
def test_the_state_of_python_s_generator_is_read_when_it_has_moved(drawn: list[Callable[[], Any]]) -> None:
    kept = KeptDraws(nn.Linear(2, 2))
    for draw in [lambda: None, *drawn]:
        draw()
        assert kept.take().generators.of_python == random.getstate()


@pytest.mark.parametrize(
    "drawn",
    [
        [lambda: torch.rand(1), lambda: torch.rand(1), lambda: None],
        [lambda: torch.randn(1), lambda: torch.randn(1), lambda: torch.rand(1)],  # every second one is kept
        [lambda: torch.randn(1, dtype=torch.float64)] * 2,
        [lambda: None, lambda: torch.manual_seed(3), lambda: torch.manual_seed(3), lambda: torch.manual_seed(4)],
        [lambda: torch.randint(0, 2**31, (624 * 3,)), lambda: None],  # it moves by whole rounds
        [lambda: nn.functional.dropout(torch.ones(8))] * 2,
        [lambda: torch.randperm(9), lambda: torch.empty(3).exponential_()],
    ],
    ids=["uniform", "normal", "double", "seeded", "rounds", "dropout", "others"],
)
def test_the_state_of_torch_s_generator_is_read_when_it_has_moved(drawn: list[Callable[[], Any]]) -> None:
    generators = Generators()
    for draw in [lambda: None, *drawn]:
        draw()
        assert torch.equal(generators.states().of_torch, torch.get_rng_state())


def test_states_are_the_same_object_until_one_moves() -> None:
    """So nothing is read in most steps; were a generator's memory not where it is looked for, it would be read."""
    generators = Generators()
    random.seed(1), np.random.seed(1)
    before = generators.states()
    assert generators.states() is before
    for draw in (random.random, np.random.rand, lambda: torch.rand(1)):
        draw()
        after = generators.states()
        assert after is not before and generators.states() is after
        before = after


def test_a_generator_that_is_seeded_in_each_step_is_not_read() -> None:
    generators = Generators(of_torch=False)
    before = generators.states()
    torch.rand(1)
    assert generators.states() is before
    random.random()
    assert generators.states().of_torch is before.of_torch


@pytest.mark.parametrize("shapes", [[(3,), (2,), (), ()], [(2, 3), (3,), ()], [(0,), (1, 1, 1)], []])
def test_copies_of_buffers_keep_their_order_and_shapes(shapes: list[tuple[int, ...]]) -> None:
    model = nn.Module()
    for i, shape in enumerate(shapes):
        for dtype in (torch.uint8, torch.bfloat16, torch.float32, torch.int64, torch.complex64):
            model.register_buffer(f"{i}-{dtype}".replace(".", "_"), torch.randn(shape).mul(9).abs().to(dtype))
        model.register_buffer(f"{i}-turned", torch.randn(*shape, 3, 2).mT)
        model.register_buffer(f"{i}-yes", torch.zeros(shape, dtype=torch.bool))
    kept = KeptDraws(model)
    before = kept.take().buffers
    for buffer in model.buffers():
        buffer.copy_(~buffer if buffer.dtype is torch.bool else buffer + 1)
    live = list(model.buffers())
    assert all(not torch.equal(a, b) for a, b in zip(before, live, strict=True) if b.numel())
    copies = kept.take().buffers
    assert [(c.shape, c.dtype) for c in copies] == [(b.shape, b.dtype) for b in live]
    assert all(torch.equal(a, b) for a, b in zip(copies, live, strict=True))
