"""Steps of a window one by one, pauses between them, and which of them are recorded as slow."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from pathlib import Path

import pytest

from echelon.collectives.times import ReduceTimes
from echelon.observe.garbage import GarbageClock
from echelon.observe.phases import PAUSES, PHASES, HostClock, Phase
from echelon.records.file import Recorder, read_records
from echelon.records.kinds import SlowStep, Steps
from echelon.trainer.slow_steps import MOST_RECORDED, SlowSteps
from echelon.trainer.step_watch import RankFacts, StepWatch
from echelon.trainer.window import ClosedWindow

WAIT = PHASES.index(Phase.COMMUNICATE)


class Script:
    """A phase clock that is told how long phases were."""

    def __init__(self) -> None:
        self.seconds = [0.0] * len(PHASES)

    def enter(self, phase: Phase | None) -> None:
        pass

    def split(self, phase: Phase, at: object) -> None:
        pass

    def so_far(self) -> list[float] | None:
        return list(self.seconds)

    def end_step(self) -> None:
        pass

    def take_steps(self) -> list[list[float]]:
        return []

    def drain(self) -> list[float]:
        seconds, self.seconds = self.seconds, [0.0] * len(PHASES)
        return seconds


def steps(watch: StepWatch, clock: Script, waits_s: Iterable[float]) -> None:
    for wait_s in waits_s:
        clock.seconds[0] += 0.01
        clock.seconds[WAIT] += wait_s
        watch.end_step()


def test_each_step_is_what_the_clock_ran_on_since_the_last() -> None:
    clock = Script()
    watch, times = StepWatch(clock, GarbageClock()), ReduceTimes()
    steps(watch, clock, [0.001, 0.005, 0.002])
    assert watch.waits == pytest.approx([0.001, 0.005, 0.002])
    clock.seconds[0] += 0.02  # after the last step, before the window is closed
    times.busy_s, times.spread_s = 0.3, 0.1
    facts = watch.close(clock.drain(), times)
    assert facts.slowest is not None and facts.slowest.place == 1
    assert (facts.slowest.seconds, facts.busy_s, facts.spread_s) == pytest.approx((0.015, 0.3, 0.1))
    watch.paused(PAUSES[0], 1.5)
    steps(watch, clock, [0.0, 0.0])
    assert watch.pauses == [[PAUSES[0]], []]
    facts = watch.close(clock.drain(), times)
    assert facts.slowest is not None
    assert facts.slowest.seconds == pytest.approx(0.03)  # what was left over belongs to the next step
    assert (facts.busy_s, facts.pauses) == (0.0, [1.5] + [0.0] * (len(PAUSES) - 1))
    assert RankFacts.of(facts.row()) == facts


def test_garbage_that_is_collected_in_a_pause_is_no_steps() -> None:
    clock = Script()
    with GarbageClock() as garbage:
        watch = StepWatch(clock, garbage)
        gc.collect()
        paused_s = garbage.seconds
        watch.paused(PAUSES[0], 1.0)
        steps(watch, clock, [0.001])
        in_step_s = garbage.seconds - paused_s
    facts = watch.close(clock.drain(), None)
    assert facts.slowest is not None and facts.slowest.gc_s == pytest.approx(in_step_s)
    assert facts.gc_s == pytest.approx(paused_s + in_step_s)


def test_slow_steps_are_recorded_with_all_ranks_and_bounded(tmp_path: Path) -> None:
    clock, record = Script(), Recorder(tmp_path)
    watch, slow = StepWatch(clock, GarbageClock()), SlowSteps(record)
    for number in range(MOST_RECORDED + 10):
        steps(watch, clock, [*[0.001] * 9, 0.2])
        pauses = watch.pauses
        facts = watch.close(clock.drain(), None)
        window = Steps(10 * number + 10, [1.0] * 10, 0.3, waits=[[0.2] * 10, [0.1] * 10])
        slow.look(ClosedWindow(window, [], [facts.slowest, None], pauses, False, False, False), watch)
    record.close()
    found = read_records(tmp_path, SlowStep)
    assert len(found) == MOST_RECORDED
    assert (found[0].step, found[0].after, found[0].phases[1]) == (10, (), None)
    assert {slow.waited_for for slow in found} == {1}  # known though the window is thinned
    assert found[0].seconds == pytest.approx(0.21)
    assert found[0].median_s == pytest.approx(0.011)


def test_a_pause_counts_for_no_phase() -> None:
    clock = HostClock()
    clock.enter(Phase.FORWARD)
    clock.enter(None)
    before = clock.so_far()
    sum(range(100_000))
    assert clock.so_far() == before
    clock.enter(Phase.DATA)
    assert sum(clock.drain()) >= sum(before)


def test_what_was_there_before_is_frozen_inside_the_block_alone() -> None:
    with GarbageClock():
        assert gc.get_freeze_count() > 10_000
    assert gc.get_freeze_count() == 0


def test_garbage_collections_are_timed_inside_the_block_alone() -> None:
    garbage = GarbageClock()
    with garbage:
        gc.collect()
        seen = garbage.seconds, garbage.collections
    assert seen[0] > 0 and seen[1] >= 1
    gc.collect()
    assert (garbage.seconds, garbage.collections) == seen


def test_communication_under_way_is_counted_once() -> None:
    times = ReduceTimes()
    first = times.handed(first=True, last=False)
    last = times.handed(first=False, last=True)
    assert times.spread_s == last - first
    times.done(first)
    times.done(last)
    assert times.busy_s == pytest.approx(times._done_s - first)
