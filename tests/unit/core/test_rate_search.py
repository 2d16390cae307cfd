"""What the losses of a search say of learning rates."""

from __future__ import annotations

import math

import pytest

from echelon.core.rate_search import HIGHEST, LOWEST, STEPS, curve_of, rate_of, suggestion


def _loss(rate: float, noise: float) -> float:
    """Return a loss that falls around a rate of 0.01, is lowest at 0.1, and then rises fast."""
    return 2.3 - 2 / (1 + (0.01 / rate) ** 1.5) + (rate / 0.5) ** 3 + noise


LOSSES = {step: _loss(rate_of(step - 1), 0.02 * (-1) ** step) for step in range(1, STEPS + 1)}


def test_the_rate_rises_by_the_same_factor_each_step() -> None:
    rates = [rate_of(step) for step in range(STEPS)]
    assert (rates[0], rates[-1]) == (LOWEST, pytest.approx(HIGHEST))
    assert rates[50] / rates[49] == pytest.approx(rates[1] / rates[0])


def test_the_steepest_fall_and_a_tenth_of_the_lowest_are_suggested() -> None:
    curve = curve_of(LOSSES)
    assert curve.over and curve.steepest is not None and curve.tenth is not None
    assert 0.005 < curve.steepest < 0.02 and 0.008 < curve.tenth < 0.03
    assert suggestion(curve).startswith(f"--lr {curve.steepest:.2g} is where")
    assert suggestion(curve, scale=2).startswith(f"--lr {curve.steepest / 2:.2g} is where")


def test_a_search_is_over_when_the_loss_is_four_times_the_lowest_or_no_number() -> None:
    first = next(step for step in LOSSES if LOSSES[step] > 30)
    until = {step: loss for step, loss in LOSSES.items() if step <= first}
    assert curve_of(until).over and not curve_of({s: x for s, x in until.items() if s < first - 10}).over
    broken = {step: math.nan if step > 60 else 2.0 for step in range(1, 80)}
    assert curve_of(broken).over and len(curve_of(broken).rates) == 60
    assert not curve_of({}).over


def test_a_loss_that_does_not_fall_suggests_nothing() -> None:
    curve = curve_of({step: 2.3 + 0.01 * (-1) ** step for step in range(1, STEPS + 1)})
    assert curve.over and curve.steepest is None and "no suggestion" in suggestion(curve)
