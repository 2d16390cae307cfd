"""The adaptive codec: its error stays within its bound, and its bits follow what gradients do."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from echelon.compression.base import Meta
from echelon.compression.registry import build, read
from echelon.compression.rungs import RungControl, Switch
from echelon.core.errors import UserError

CONTROL = RungControl(0.1, ("none", "int8", "topk"))


def heavy_tailed(step: int, power: float) -> Tensor:
    """Values of 20,000 elements; the larger the power, the fewer elements hold most of them."""
    normal = torch.randn(20_000, generator=torch.Generator().manual_seed(step))
    return normal.sign() * normal.abs() ** power


def drive(control: RungControl, errors: dict[int, float], steps: int) -> tuple[list[int], list[Switch]]:
    """Return the rungs of messages whose relative errors are known by rung, and the switches."""
    numbers, rungs, switches = control.start(1), [], []
    for _ in range(steps):
        rung = control.rung(numbers)
        rungs.append(rung)
        if switch := control.passed(numbers, "w", errors[rung]):
            switches.append(switch)
    return rungs, switches


def test_a_decision_acts_two_messages_later() -> None:
    rungs, switches = drive(CONTROL, {0: 0.0, 1: 0.01, 2: 0.05}, 6)
    assert rungs == [1, 1, 1, 2, 2, 2]
    assert [(s.vector, s.old, s.new) for s in switches] == [("w", "int8", "topk")]
    assert "0.01 is below 0.1" in switches[0].reason


def test_a_rung_that_was_too_lossy_is_left_alone_for_a_while() -> None:
    rungs, switches = drive(CONTROL, {0: 0.0, 1: 0.01, 2: 0.5}, 200)
    assert len(switches) <= 12 and rungs.count(2) <= 12
    assert sum(0.5 if rung == 2 else 0.01 for rung in rungs) / len(rungs) < 0.1


def test_where_even_eight_bits_lose_too_much_messages_are_whole() -> None:
    rungs, _ = drive(CONTROL, {0: 0.0, 1: 0.3, 2: 0.9}, 40)
    assert rungs.count(0) > 30


@pytest.mark.parametrize("error", [0.05, 0.2])
def test_the_running_mean_of_errors_stays_within_the_bound_and_bits_follow_the_gradient(error: float) -> None:
    bits = {}
    for power in (1.0, 5.0):
        codec = build(f"adaptive(error={error})")
        state = codec.init_state("w", torch.empty(20_000))
        errors, sent = [], []
        for step in range(80):
            x = heavy_tailed(step, power) + state.elementwise["error"]
            payload = codec.compress(heavy_tailed(step, power), state)
            decoded = codec.extract(codec.from_bytes(codec.to_bytes(payload), Meta((20_000,))))
            errors.append(float((x - decoded).norm() / x.norm()) ** 2)
            sent.append(8 * payload.n_bytes / 20_000)
        assert sum(errors[40:]) / len(errors[40:]) < error
        bits[power] = sum(sent[-40:]) / 40
    assert bits[5.0] < 0.8 * bits[1.0] < 8


def test_a_message_of_no_rung_is_refused() -> None:
    codec = build("adaptive")
    payload = codec.compress(heavy_tailed(0, 1.0), codec.init_state("w", torch.empty(20_000)))
    buffer = codec.to_bytes(payload)
    buffer[8] = 200
    with pytest.raises(ValueError, match="message"):
        codec.extract(codec.from_bytes(buffer, Meta((20_000,))))


def test_momentum_stays_with_the_optimizer_through_all_switches() -> None:
    assert read("adaptive(0.1)").with_momentum(0.9) == (read("adaptive(0.1)"), 0.9)


@pytest.mark.parametrize("text", ["adaptive(0)", "adaptive(0.9)"])
def test_a_bound_that_cannot_be_is_refused(text: str) -> None:
    with pytest.raises(UserError, match="above 0 and at most"):
        build(text)
