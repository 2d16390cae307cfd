"""Whether gradients go as they are or through a codec, over links that change: simulated steps, two ranks."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from echelon.collectives.pace import LinkPace


def drive(seconds: Callable[[bool, int], float], steps: int) -> tuple[list[bool], float]:
    """Return, by step, whether gradients went as they were, and the seconds of all steps.

    Args:
        seconds: of a step, by whether its gradients go as they are, and its number.
    """
    ranks = [LinkPace(), LinkPace()]
    plain, now_s, heard_s = [], 0.0, 0.0
    for step in range(steps):
        for rank, pace in enumerate(ranks):
            pace.begin(now_s + 0.001 * rank * (step % 3), heard_s)
        assert ranks[0].way == ranks[1].way
        plain.append(ranks[0].is_plain)
        heard_s = sum(pace.tells_s for pace in ranks) / 2
        now_s += seconds(ranks[0].is_plain, step)
    return plain, now_s


@pytest.mark.parametrize("slower", [1.05, 1.3, 2.0, 5.0])
def test_where_nothing_is_to_be_gained_steps_take_at_most_a_fiftieth_more(slower: float) -> None:
    plain, took_s = drive(lambda is_plain, step: 0.1 if is_plain else 0.1 * slower, 3000)
    assert took_s < 1.02 * 300
    assert plain[-1] or slower < 1.1


def test_a_slow_link_is_seen_after_a_few_steps_and_left_when_it_is_fast_again() -> None:
    def seconds(is_plain: bool, step: int) -> float:
        slow = 500 <= step < 1500
        return (2.0 if slow else 0.1) if is_plain else (0.3 if slow else 0.15)

    plain, took_s = drive(seconds, 2500)
    assert sum(plain[540:1500]) < 20
    assert all(plain[1600:1650])
    best_s = 500 * 0.1 + 1000 * 0.3 + 1000 * 0.1
    assert took_s < 1.1 * best_s


def test_a_pause_changes_nothing() -> None:
    plain, _ = drive(lambda is_plain, step: 5.0 if step % 50 == 49 else (0.1 if is_plain else 0.2), 1000)
    assert sum(plain) > 950


def test_a_saved_state_goes_on() -> None:
    pace, again = LinkPace(), LinkPace()
    for step in range(200):
        pace.begin(0.1 * step if pace.is_plain else 0.05 * step, 0.1 if pace.is_plain else 0.05)
    again.load_state_dict(pace.state_dict())
    assert again.state_dict() == pace.state_dict()


def test_void_steps_and_the_first_ones_say_nothing() -> None:
    pace = LinkPace()
    for step in range(100):
        pace.begin(0.1 * step, math.nan)
    assert pace.is_plain and not pace.switches
