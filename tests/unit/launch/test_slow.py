"""Who slows the others down, given what all processes are at again and again."""

from __future__ import annotations

from echelon.launch.slow import AGAIN_S, BETWEEN_S, FIRST_S, LOOKS, MOST_UNSURE, Slow, SlowWatch
from tests.unit.launch.test_culprit import USER, WAITING, Observed, at

SLOW = [WAITING, at(1, "forward", USER)]
BOTH = [at(0, "forward", USER), at(1, "forward", USER)]


def _follow(
    watch: SlowWatch, pattern: list[list[Observed]], seconds: float = FIRST_S + 3 * LOOKS * BETWEEN_S
) -> Slow | None:
    """Let a watch see one observation after the other, over and over; returns what it first says."""
    now, looks = 100.0, 0
    while now < 100.0 + seconds:
        observed = pattern[looks % len(pattern)]
        if watch.wants_look({o.process.name: o.note for o in observed}, now):
            looks += 1
            slow = watch.looked(observed, now)
            if slow is not None:
                return slow
        now += 0.1
    return None


def test_who_alone_works_at_nearly_every_look_is_slow() -> None:
    slow = _follow(SlowWatch(independent=False), [[WAITING, at(1, "forward", USER)]])
    assert slow is not None and slow.process.rank == 1
    assert "makes all others wait: at 8 of 8 looks it alone worked, mostly in forward (net.py:12" in slow.sentence()


def test_ranks_that_take_turns_are_not_slow() -> None:
    pattern = [[WAITING, at(1, "forward", USER)], [at(0, "forward", USER), at(1, "communicate")]]
    assert _follow(SlowWatch(independent=False), pattern) is None
    assert _follow(SlowWatch(independent=False), [[at(0, "forward", USER), at(1, "forward", USER)]]) is None


def test_it_is_told_once() -> None:
    watch = SlowWatch(independent=False)
    assert _follow(watch, [[WAITING, at(1, "forward", USER)]]) is not None
    assert _follow(watch, [[WAITING, at(1, "forward", USER)]]) is None


def test_looks_that_mostly_agree_are_repeated_soon_and_a_few_times() -> None:
    """On busy cores a step has less of the slow process's work in it."""
    unsure = [SLOW] * 6 + [BOTH] * 2
    assert _follow(SlowWatch(independent=False), unsure + [SLOW] * LOOKS, AGAIN_S) is not None
    watch = SlowWatch(independent=False)
    assert _follow(watch, unsure * (1 + MOST_UNSURE) + [SLOW] * LOOKS, AGAIN_S) is None
