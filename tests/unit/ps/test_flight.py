"""How much is on its way to a peer, and what travels next."""

from __future__ import annotations

import pytest

from echelon.ps.flight import LEAST_BYTES, MOST_BYTES, FlightWindow, OwedValues
from echelon.ps.messages import Pull

PIECE = 1 << 20


def through(bytes_per_s: float, latency_s: float, pieces: int = 200) -> tuple[FlightWindow, float]:
    """Send pieces over a path; returns the window, and the share of the path's rate that the last half had."""
    window, now_s, free_s = FlightWindow(measures=True), 0.0, 0.0
    coming: list[tuple[float, int]] = []
    arrivals = []
    for number in range(pieces):
        while not window.has_room:
            now_s, arrived = coming.pop(0)
            window.arrived(arrived, now_s)
        window.leaves(number, PIECE, now_s)
        free_s = max(free_s, now_s) + PIECE / bytes_per_s
        coming.append((free_s + latency_s, number))
        arrivals.append(free_s)
    half = pieces // 2
    return window, (pieces - 1 - half) * PIECE / (arrivals[-1] - arrivals[half]) / bytes_per_s


@pytest.mark.parametrize(("mbit", "latency_s"), [(1000, 0.0002), (100, 0.0002), (100, 0.05), (1000, 0.01)])
def test_the_path_stays_full_and_little_waits_in_it(mbit: float, latency_s: float) -> None:
    rate = mbit * 1e6 / 8
    window, share = through(rate, latency_s)
    assert share > 0.97
    holds = rate * latency_s
    assert LEAST_BYTES <= window.limit <= LEAST_BYTES + holds + 2 * PIECE


def test_what_is_forgotten_or_unknown_is_not_on_its_way() -> None:
    window = FlightWindow(measures=False)
    assert window.limit == MOST_BYTES
    window.leaves(1, MOST_BYTES, 0.0)
    assert not window.has_room
    window.arrived(2, 1.0)
    assert not window.has_room
    window.leaves(1, 5, 1.0)  # again
    assert window.in_flight == 5
    window.forget(1)
    window.arrived(1, 2.0)
    assert window.in_flight == 0


def test_a_value_that_is_needed_sooner_leaves_first() -> None:
    owed = OwedValues("w")
    for key, place in ((7, 3), (8, 1), (9, 2), (7, 1)):
        owed.owe(Pull(key, 1, True, False, 0, place))
    assert [pull.key for pull in owed.waiting()] == [8, 7, 9, 7]
    owed.forget(7)
    owed.window.leaves(1, LEAST_BYTES, 0.0)
    assert owed.next() is None
    owed.window.arrived(1, 0.0)
    assert [owed.next(), owed.next(), owed.next()] == [
        Pull(8, 1, True, False, 0, 1),
        Pull(9, 1, True, False, 0, 2),
        None,
    ]
