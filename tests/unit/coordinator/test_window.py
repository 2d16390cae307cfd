"""Windows of a run with servers: what workers do at the same time, and in other order than steps have."""

from __future__ import annotations

import pytest

from echelon.coordinator.messages import TaskReport
from echelon.coordinator.window import WindowAccumulator
from echelon.observe.phases import PHASE_NAMES

ROW = [0.1] * len(PHASE_NAMES)


def report(lr: float = 0.1, loss: float = 1.0, share: float = 1.0) -> TaskReport:
    return TaskReport(loss, None, 8, lr, ROW, 0, share=share)


def every(step: int) -> bool:
    return True


def test_a_pause_lies_in_the_windows_that_it_lasts_over() -> None:
    """It is no phase, and a window has the seconds that a worker had for steps, the mean of the workers."""
    window, found = WindowAccumulator(0.0), []
    for end_s in (1.0, 2.0, 3.0):
        if end_s == 1.0:
            window.pause("a", "evaluation", 0.75)
        if end_s == 3.0:
            window.resume("a", 2.5)
        window.add("b", int(end_s), report(), True, end_s)
        steps, window = window.close(0, int(end_s), ["a", "b"], end_s, every)
        found.append(steps)
    assert all(steps.phase_names == PHASE_NAMES for steps in found)
    assert [[dict(zip(s.pause_names, row, strict=True))["evaluation"] for row in s.pauses] for s in found] == [
        [0.25, 0.0], [1.0, 0.0], [0.5, 0.0],
    ]  # fmt: skip
    assert [steps.seconds for steps in found] == pytest.approx([0.875, 0.5, 0.75])


def test_a_pause_begins_when_the_step_before_it_is_done() -> None:
    """A worker asks for what is next while it computes."""
    window = WindowAccumulator(0.0)
    window.pause("a", "evaluation", 0.5)
    window.add("a", 1, report(), True, 0.75)
    steps, _ = window.close(0, 1, ["a"], 1.0, every)
    assert dict(zip(steps.pause_names, steps.pauses[0], strict=True))["evaluation"] == pytest.approx(0.25)


def test_the_learning_rate_is_that_of_the_newest_step() -> None:
    window, rates = WindowAccumulator(0.0), []
    for place, done in enumerate(([3, 1, 5, 2], [4], [6]), 1):
        for step in done:
            window.add("a", step, report(lr=1.0 / step), True, float(step))
        steps, window = window.close(0, place, ["a"], float(place), every)
        rates.append(steps.lr)
    assert rates == [1 / 5, 1 / 5, 1 / 6]


def test_the_loss_of_a_step_waits_for_all_of_its_shares() -> None:
    """A window never closes between two of them; where an earlier launch had some, it is of those that are here."""
    window = WindowAccumulator(0.0)
    window.add("a", 0, report(loss=0.5, share=0.5), True, 0.5)
    window.add("b", 1, report(loss=0.25, share=0.5), True, 0.5)
    assert not window.has_steps(lambda step: False)
    steps, window = window.close(0, 1, ["a"], 1.0, lambda step: step == 0)
    assert steps.losses == [1.0]  # of half the batch
    window.add("a", 1, report(loss=0.5, share=0.5), True, 1.5)
    assert window.close(0, 2, ["a"], 2.0, every)[0].losses == [0.75]
