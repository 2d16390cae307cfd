"""Delay compensation, weighting by staleness and age, and what one key's server does, against NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from echelon.ps.keystore import KeyStore, Push, PushOutcome, age_factor, staleness_factor
from echelon.ps.table import KeyPart, KeyRange
from echelon.sync.ps import ServerSettings, corrected_momentum

LR, STEPS, WORKERS = 0.1, 40, 3


def store(settings: ServerSettings) -> KeyStore:
    key = KeyRange(0, 0, 4, 0, (KeyPart(0, 4, (4,), True, "w"),))
    value = torch.tensor([1.0, -2.0, 3.0, 0.5], dtype=torch.float64)
    return KeyStore(key, value, settings, lambda tensors, decay: torch.optim.SGD(tensors, lr=LR))


def push(worker: str, task: int, gradient: torch.Tensor, **more: int) -> Push:
    values = {"step": task, "share": 0, "shares": 1, "units": 1, "base": 0, "batch": 1} | more
    return Push(worker, task, lr=LR, gradient=gradient, **values)


def gradient_at(w: np.ndarray) -> np.ndarray:
    return w**3 - np.array([0.5, 0.1, -0.2, 0.9])


def reference(kind: str, strength: float) -> np.ndarray:
    """DC-ASGD in ten lines: workers take turns, each computes on what it pulled a round before (Zheng et al. 2017)."""
    w = np.array([1.0, -2.0, 3.0, 0.5]) / 3
    then = [w.copy() for _ in range(WORKERS)]
    mean_square = [np.zeros(4) for _ in range(WORKERS)]
    for step in range(STEPS):
        m = step % WORKERS
        g = gradient_at(then[m])
        if kind == "adaptive":
            mean_square[m] = 0.95 * mean_square[m] + 0.05 * g * g
        scale = {"none": 0.0, "constant": strength, "adaptive": strength / np.sqrt(mean_square[m] + 1e-7)}[kind]
        w = w - LR * (g + scale * g * g * (w - then[m]))
        then[m] = w.copy()
    return w


@pytest.mark.parametrize("kind", ["none", "constant", "adaptive"])
def test_golden_trajectory(kind: str) -> None:
    settings = ServerSettings(compensation=kind)
    one = store(settings)
    one.value /= 3
    pulled = []
    for m in range(WORKERS):
        one.note_pull(f"w{m}", 0.0)
        pulled.append(one.value.clone())
    for step in range(STEPS):
        m = step % WORKERS
        gradient = torch.from_numpy(gradient_at(pulled[m].numpy()))
        assert one.take(push(f"w{m}", step, gradient)) is PushOutcome.APPLIED
        one.note_pull(f"w{m}", 0.0)
        pulled[m] = one.value.clone()
    np.testing.assert_allclose(one.value.numpy(), reference(kind, settings.compensation_strength), atol=1e-12)


def test_factors() -> None:
    assert [staleness_factor(t) for t in (0, 1, 4)] == [1.0, 1.0, 0.25]
    assert age_factor(2.0, 2.0) == pytest.approx(math.exp(-1))
    assert corrected_momentum(0.9, 1) == pytest.approx(0.9)
    assert corrected_momentum(0.9, 4) == pytest.approx(0.6)
    assert corrected_momentum(0.9, 100) == 0.0


def test_a_stale_gradient_moves_the_parameters_by_less() -> None:
    """Divided by its staleness, in versions since its worker's pull; at staleness 0 and 1 not at all."""
    one = store(ServerSettings(by_staleness=True))
    gradient = torch.ones(4, dtype=torch.float64)
    one.note_pull("slow", 0.0)
    moved = []
    for task, worker in enumerate(["a", "a", "a", "slow"]):
        if worker == "a":
            one.note_pull("a", 0.0)
        before = one.value.clone()
        came = push(worker, task, gradient, base=0 if worker == "slow" else one.version)
        one.take(came._replace(scale=one.scale_of(came, 0.0)))
        moved.append(float((before - one.value).mean()) / LR)
    assert moved == pytest.approx([1, 1, 1, 1 / 3])


@pytest.mark.parametrize(
    ("settings", "workers", "scale"),
    [
        (ServerSettings(), 4, 1 / 3),
        (ServerSettings(), 3, 1.0),
        (ServerSettings("ssp"), 4, 1.0),
        (ServerSettings(by_staleness=False), 4, 1.0),
        (ServerSettings(by_staleness=True), 2, 1 / 3),
    ],
)
def test_many_workers_gradients_are_scaled_unless_somebody_chose(
    settings: ServerSettings, workers: int, scale: float
) -> None:
    one = store(settings)
    one.set_workers(workers)
    one.version = 3
    came = push("slow", 0, torch.ones(4, dtype=torch.float64), base=0)
    assert one.scale_of(came, 0.0) == pytest.approx(scale)


def test_an_old_gradient_weighs_less() -> None:
    one = store(ServerSettings(decay_s=2.0))
    one.note_pull("a", 5.0)
    before = one.value.clone()
    came = push("a", 0, torch.ones(4, dtype=torch.float64))
    one.take(came._replace(scale=one.scale_of(came, 8.0)))
    assert (before - one.value).numpy() == pytest.approx(LR * math.exp(-1.5))


def test_momentum_is_lowered_by_what_asynchrony_adds() -> None:
    key = KeyRange(0, 0, 4, 0, (KeyPart(0, 4, (4,), True, "w"),))

    def moved(workers: int, corrected: bool) -> float:
        settings = ServerSettings(momentum_correction=corrected)
        value = torch.zeros(4, dtype=torch.float64)
        one = KeyStore(key, value, settings, lambda tensors, decay: torch.optim.SGD(tensors, lr=LR, momentum=0.9))
        one.set_workers(workers)
        for task in range(2):
            one.take(push("a", task, torch.ones(4, dtype=torch.float64)))
        return -float(one.value.mean()) / LR

    assert moved(4, corrected=False) == pytest.approx(1 + 1.9)
    assert moved(4, corrected=True) == pytest.approx(1 + 1.6)
    assert moved(1, corrected=True) == pytest.approx(1 + 1.9)


@pytest.mark.parametrize(("momentum", "correction"), [(0.9, None), (0.0, None), (0.9, True)])
def test_what_is_said_of_sgd_is_done_to_no_other_optimizer_unless_asked_for(
    momentum: float, correction: bool | None
) -> None:
    key = KeyRange(0, 0, 4, 0, (KeyPart(0, 4, (4,), True, "w"),))
    settings = ServerSettings(momentum_correction=correction)
    make = lambda tensors, decay: torch.optim.RMSprop(tensors, lr=LR, momentum=momentum)  # noqa: E731
    one = KeyStore(key, torch.zeros(4), settings, make)
    one.set_workers(4, 1)
    for task in range(4):
        one.take(push("a", task, torch.ones(4)))
    corrected = corrected_momentum(momentum, 4) if correction else momentum
    assert one.optimizer.param_groups[0]["momentum"] == corrected
    assert (one.scale_of(push("b", 9, torch.ones(4)), 0.0) == 1.0) is not bool(correction)


def test_each_task_counts_once() -> None:
    one = store(ServerSettings())
    gradient = torch.ones(4, dtype=torch.float64)
    assert one.take(push("a", 7, gradient)) is PushOutcome.APPLIED
    before = one.value.clone()
    assert one.take(push("b", 7, gradient)) is PushOutcome.DUPLICATE
    one.applied.raise_to(8)
    assert one.take(push("b", 3, gradient)) is PushOutcome.DUPLICATE
    assert torch.equal(one.value, before)


def test_backup_takes_the_first_and_scales_them() -> None:
    one = store(ServerSettings("sync", backup=1))
    before = one.value.clone()
    ones = torch.ones(4, dtype=torch.float64) / 12  # sums over 4 of 12 samples would be a third of the batch's
    fates = [one.take(push("w", s, ones, step=0, share=s, shares=3, units=4, batch=12)) for s in range(3)]
    assert fates == [PushOutcome.PENDING, PushOutcome.APPLIED, PushOutcome.LATE]
    torch.testing.assert_close(one.value, before - LR * 2 * ones * 12 / 8)


def test_shares_add_up_to_the_same_bits_in_every_order_and_over_a_restart() -> None:
    gradients = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    seen = []
    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1], [1, 0, 4, 3, 2]):
        one = store(ServerSettings("sync"))
        for n, share in enumerate(order):
            if n == 3:
                saved = one.whole_state()
                one = store(ServerSettings("sync"))
                one.load_state(saved, 0.0)
            one.take(push("w", share, gradients[share], step=0, share=share, shares=5))
        assert one.version == 1
        seen.append(one.value)
    assert all(torch.equal(value, seen[0]) for value in seen)


def test_pushes_of_later_versions_wait_for_their_turn() -> None:
    one = store(ServerSettings("sync"))
    start = one.value.clone()
    gradient = torch.ones(4, dtype=torch.float64)
    assert one.take(push("a", 1, gradient, step=1)) is PushOutcome.PENDING
    assert one.take(push("a", 0, gradient, step=0)) is PushOutcome.APPLIED
    assert one.version == 2
    torch.testing.assert_close(one.value, start - 2 * LR)


def test_state_goes_round() -> None:
    settings = ServerSettings(compensation="adaptive")
    one, other = store(settings), store(settings)
    one.note_pull("a", 0.0)
    one.take(push("a", 0, torch.ones(4, dtype=torch.float64)))
    other.load_state(one.state(full=True), 0.0)
    for each in (one, other):
        each.take(push("a", 1, torch.full((4,), 2.0, dtype=torch.float64)))
        assert each.take(push("a", 0, torch.ones(4, dtype=torch.float64))) is PushOutcome.DUPLICATE
    assert torch.equal(one.value, other.value)
