"""The controller of `period=auto`: a pure function of what replicas told each other."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch

from echelon.core.errors import UserError
from echelon.sync.averaging.period import PeriodChange, PeriodControl, PeriodFollower, PeriodState
from echelon.sync.averaging.plan import FEWEST_PERIODS
from echelon.sync.diloco import DilocoSettings
from echelon.sync.local import LocalSettings
from echelon.sync.registry import read

STEP_S = 0.02


def _control(steps: int = 4000, spec: str = "local(auto)") -> PeriodControl:
    settings = read(spec)
    assert isinstance(settings, LocalSettings | DilocoSettings)
    return settings.plan().for_run(steps).control()


def _follow(
    control: PeriodControl, averages_s: list[float], steps: int, step_s: float = STEP_S
) -> tuple[PeriodState, list[PeriodChange], list[int]]:
    """Let a run go whose averages take these seconds, the last one of them again and again."""
    state, changes, taken = control.start(), [], []
    told = (0.0, 0.0)
    while (due := control.due(state)) < steps:
        taken.append(due)
        state, change = control.told(replace(state, taken=due), due + control.overlap, [told, told])
        changes += [change] if change is not None else []
        if len(taken) > 2:  # a process does not count its first step and average
            told = (step_s, averages_s[min(len(taken), len(averages_s)) - 1])
    return state, changes, taken


def test_what_is_heard_first_decides_at_once() -> None:
    state, (change,), taken = _follow(_control(), [0.02], 4000)
    assert taken[:5] == [1, 2, 3, 4, 4 + -(-state.period // 4)]
    assert (change.step, change.old, change.new) == (4, 4, state.period)
    assert "an average takes 20 ms and a step 20 ms" in change.reason


@pytest.mark.parametrize("average_s", [0.0005, 0.005, 0.02, 0.1, 0.3])
@pytest.mark.parametrize("step_s", [0.01, 0.02, 0.2])
def test_communication_takes_a_tenth_of_a_long_run(average_s: float, step_s: float) -> None:
    steps = 20_000
    state, _, taken = _follow(_control(steps), [average_s], steps, step_s)
    share = len(taken) * average_s / (len(taken) * average_s + steps * step_s)
    assert share <= 0.105
    shorter = replace(state, period=state.period // 2)
    assert state.period == 1 or _share(shorter, average_s, step_s) > 0.1, "never longer than necessary"


def _share(state: PeriodState, average_s: float, step_s: float) -> float:
    return 1.3 * average_s / (1.3 * average_s + state.period * step_s)


def test_a_fast_link_has_a_short_period_and_a_slow_one_a_long_one() -> None:
    periods = [_follow(_control(), [seconds], 4000)[0].period for seconds in (0.0001, 0.005, 0.02, 0.1, 0.3)]
    assert periods == sorted(periods) and periods[0] == 1 and periods[-1] > 100


@pytest.mark.parametrize("steps", [60, 172, 284, 780, 5000])
@pytest.mark.parametrize("spec", ["local(auto)", "diloco(auto)", "local(auto, warmup=0)", "local(auto, start=20)"])
def test_a_run_has_enough_averages_however_slow_the_link(steps: int, spec: str) -> None:
    control = _control(steps, spec)
    _, changes, taken = _follow(control, [60.0], control.steps)
    assert len(taken) + 1 >= min(FEWEST_PERIODS, control.steps), "the last step of a run has one of its own"
    if control.most > 4:
        assert f"a run of {control.steps} steps is to have more averages" in changes[0].reason


def test_averages_are_four_times_as_frequent_in_the_warm_up() -> None:
    control = _control(4000)
    state = replace(control.start(), period=40)
    assert control.dense == 400
    assert [control.due(replace(state, taken=step)) - step for step in (0, 399, 400, 3000)] == [10, 10, 40, 40]


def test_one_slow_average_changes_nothing_and_a_slow_link_does() -> None:
    once = [0.02] * 8 + [2.0] + [0.02]
    assert len(_follow(_control(), once, 4000)[1]) == 1
    state, changes, _ = _follow(_control(), [0.02] * 8 + [0.2], 4000)
    assert len(changes) == 2 and changes[1].new == state.period > 5 * changes[0].new
    state, changes, _ = _follow(_control(), [0.2] * 8 + [0.02], 4000)
    assert changes[-1].new == state.period and state.period * 5 < changes[0].new


def test_what_is_about_right_stays() -> None:
    _, changes, _ = _follow(_control(), [0.02, 0.02, 0.022, 0.018, 0.021, 0.019, 0.024, 0.016, 0.02], 4000)
    assert len(changes) == 1


def test_the_slowest_replica_computes_and_the_last_one_waits_for_nobody() -> None:
    control = _control()
    state = replace(control.start(), taken=3)
    one, _ = control.told(state, 3, [(0.02, 0.5), (0.05, 0.02)])
    assert one.heard == ((0.05, 0.02),)
    told = [(0.0, 0.0), (0.05, 0.02), (0.02, 0.0)]
    assert control.told(state, 3, told)[0] == one, "a newcomer knows nothing yet"
    assert control.told(state, 3, [(0.0, 0.0)]) == (state, None)


def test_what_overlap_hides_costs_nothing() -> None:
    control = _control(4000, "local(auto, overlap=4, warmup=0)")
    assert control.least == 5
    assert control.wanted(STEP_S, 4 * STEP_S) == 1 and control.wanted(STEP_S, 5 * STEP_S) == 9
    state, _, taken = _follow(control, [0.04], 4000)
    assert state.period == 5 and all(later - step > 4 for step, later in itertools.pairwise(taken))
    waits = _control(4000, "local(auto, overlap=4)")
    hides = _control(4000, "diloco(auto, overlap=4)")
    assert waits.wanted(STEP_S, 4 * STEP_S) > hides.wanted(STEP_S, 4 * STEP_S) == 1, "local waits in the warm-up"


def test_a_run_of_unknown_length_has_a_longest_period() -> None:
    control = _control(0)
    assert _follow(control, [60.0], 1000)[0].period == control.most == 64


def test_the_state_goes_through_a_checkpoint() -> None:
    changes: list[PeriodChange] = []
    follower = PeriodFollower(_control(), torch.device("cpu"), changes.append)
    for step in (1, 2, 3):
        follower.begin_step()
        follower.enter()
        follower.take(step)
        follower.landed(step, torch.tensor([[STEP_S, 0.1]], dtype=torch.float64), None)
        follower.leave()
    (change,) = changes
    again = PeriodFollower(_control(), torch.device("cpu"), changes.append)
    again.load_state_dict(follower.state_dict(), 3)
    assert again.state_dict() == follower.state_dict()
    assert (again.period, again.due) == (change.new, follower.due)
    again.load_state_dict({}, 7)
    assert (again.period, again.due) == (4, 8), "a checkpoint of a run whose period was fixed"


def test_what_was_decided_in_steps_that_are_trained_again_is_decided_again() -> None:
    control = _control()
    state = replace(control.start(), planned=((8, 20), (30, 7)))
    taken, changes = [], []
    while state.planned:
        due = control.due(state)
        taken.append(due)
        state, change = control.told(replace(state, taken=due), due, [(STEP_S, 60.0)])
        changes += [change] if change is not None else []
    assert [(change.step, change.new) for change in changes] == [(8, 20), (33, 7)], "or at the average after that step"
    assert taken[:9] == [*range(1, 9), 13] and all("trained before" in change.reason for change in changes)
    state, change = control.told(replace(state, taken=control.due(state)), control.due(state), [(STEP_S, 60.0)])
    assert change is not None and change.new == control.most, "then by what is measured"


def test_who_lacks_an_average_hears_what_it_decided() -> None:
    changes: list[PeriodChange] = []
    ahead, behind = (PeriodFollower(_control(), torch.device("cpu"), changes.append) for _ in range(2))
    ahead.take(1)
    ahead.landed(1, torch.tensor([[STEP_S, 0.1]], dtype=torch.float64), None)
    behind.take_shared(ahead.shared(), 1)
    assert behind.shared() == ahead.shared()
    decided, heard = changes
    assert (heard.step, heard.old, heard.new) == (decided.step, decided.old, decided.new)


def test_the_outer_optimizer_follows_the_period() -> None:
    settings = DilocoSettings("auto")
    lr, momentum = settings.outer(400, 20)
    assert (lr, momentum) == DilocoSettings(20).outer(400)
    assert "follow the period" in settings.length_notes(400)[-1]


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        ("local(fast)", "must be at least 1, or auto"),
        ("local(0)", "must be at least 1, or auto"),
        ("diloco(auto, fragments=2)", "leave out fragments"),
        ("easgd(auto)", "period must be a whole number"),
    ],
)
def test_what_cannot_be_is_refused_in_words(spec: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        read(spec)


def test_what_is_chosen_is_told_at_the_start() -> None:
    chosen, often = read("local(auto)").length_notes(284)
    assert "at most 20 of 284 steps" in chosen and "first 50 of 284" in often
    assert str(read("local(auto)")) == "local(period=auto)"
