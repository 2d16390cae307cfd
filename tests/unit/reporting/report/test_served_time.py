"""Times of a run with servers, whose workers pause one at a time: shares, parts and rates add up, and are one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from echelon.observe.phases import PAUSES
from echelon.records.kinds import End, Evaluation, Pause, Record, Start, Steps, WorkerWindow
from echelon.reporting.report.records import RunRecord, with_pauses_apart
from echelon.reporting.report.timing import measure
from echelon.reporting.report.waterfall import MISSING, waterfall_of
from echelon.reporting.report.whole_run import whole_run_of
from echelon.reporting.report.words import whole_run_words
from echelon.trainer.display import EpochTotals

PHASES = ("data", "forward", "backward", "communicate", "update", "other")
TRAINS, PAUSED = [0.02, 0.15, 0.25, 0.06, 0.01, 0.01], [0.0] * 6  # of half a second
SAMPLES_PER_S = 320.0


def window(number: int, evaluates: bool, **more: Any) -> Steps:
    """Return the window of half a second before `number / 2` seconds, in which the first worker may evaluate."""
    steps, step = (10, 20 * number - 10 * max(0, number - 2)) if evaluates else (20, 90 if number == 6 else 20 * number)
    rows = [PAUSED if evaluates else TRAINS, TRAINS]
    fields = {"seconds": 0.5, "phase_names": PHASES, "phases": rows, "samples": 8 * steps, **more}
    return Steps(step, [1.0] * steps, t=number / 2, **fields)


def of_now() -> list[Steps]:
    paused = {"pause_names": PAUSES, "pauses": [[0.5, 0.0, 0.0, 0.0], [0.0] * 4], "seconds": 0.25}
    return [window(n, 3 <= n <= 5, **(paused if 3 <= n <= 5 else {})) for n in range(1, 7)]


def of_before() -> list[Steps]:
    """A second and a half of evaluation, told among the phases with the first step after it."""
    told = {"phase_names": (*PHASES, "evaluation"), "phases": [[*TRAINS, 1.5], [*TRAINS, 0.0]]}
    return [window(n, 3 <= n <= 5, **(told if n == 6 else {})) for n in range(1, 7)]


@pytest.fixture(params=[of_now, of_before], ids=["now", "before"])
def record(request: pytest.FixtureRequest) -> RunRecord:
    start = Start(world_size=2, served=True, launched_t=-1.0, t=0.02)  # written a moment after workers began
    evaluated = [Evaluation(40, seconds=1.4, t=2.51), Evaluation(90, seconds=0.9, t=4.0)]
    ended: list[Record] = [Pause("evaluation", 1.0, 90, t=4.0), evaluated[1], End("completed", "", 6.0, t=5.0)]
    paused: list[Record] = [Pause("evaluation", 1.5, 40, t=2.5), evaluated[0]]
    clocks = WorkerWindow(90, {"worker0": 30, "worker1": 60}, t=3.0)
    windows: list[Steps] = request.param()
    lines = [start, *windows[:5], *paused, windows[5], clocks, *ended]
    return RunRecord("served", with_pauses_apart(lines))


def test_shares_of_a_step_add_up_on_every_rank(record: RunRecord) -> None:
    timing = measure(record)
    assert timing is not None and timing.by_rank
    for phases in (*timing.by_rank, timing.phases):
        assert sum(phases.values()) == pytest.approx(timing.step_s)
        assert not set(phases) & set(PAUSES)


def test_steps_and_pauses_are_the_whole_run(record: RunRecord) -> None:
    whole = whole_run_of(record)
    assert whole is not None
    assert (whole.seconds, whole.steps_s) == pytest.approx((4.0, 2.25))
    assert whole.steps_s + sum(whole.pauses.values()) == pytest.approx(whole.seconds)
    assert whole.pauses["evaluation"] == pytest.approx(1.75) and whole.pauses["other"] == pytest.approx(0)
    assert whole_run_words(whole, waits_for_servers=True) == [
        "From the first step to the last evaluation or checkpoint it took 4 s: steps 56.2%, evaluation 43.8% "
        "(means of the workers)."
    ]


def test_all_rates_are_samples_over_the_time_of_steps(record: RunRecord) -> None:
    timing, whole, waterfall, epoch = measure(record), whole_run_of(record), waterfall_of(record), EpochTotals()
    assert timing is not None and whole is not None and waterfall is not None
    for line in record.windows:
        epoch.add(line)
        assert line.samples_per_s == pytest.approx(SAMPLES_PER_S)
    in_phases_s = sum(sum(waterfall.parts[name]) for name in PHASES) / waterfall.ranks
    assert timing.samples_per_s == pytest.approx(SAMPLES_PER_S)
    for seconds in (epoch.seconds, whole.steps_s, in_phases_s):
        assert epoch.samples / seconds == pytest.approx(SAMPLES_PER_S)


def test_the_waterfall_has_each_ranks_own_pauses(record: RunRecord) -> None:
    waterfall = waterfall_of(record)
    assert waterfall is not None
    assert waterfall.parts["evaluation"] == pytest.approx((2.5, 1.0))  # at the end all wait for it
    assert max(map(abs, waterfall.parts[MISSING])) < 0.03


def test_a_worker_without_a_batch_is_in_no_phase(record: RunRecord) -> None:
    """The second one has none in the last window."""
    last = record.windows[-1]
    busy = [*last.phases[:1], PAUSED]
    idle = RunRecord("run", [replace(line, phases=busy) if line is last else line for line in record.records])
    timing, waterfall = measure(idle), waterfall_of(idle)
    assert timing is not None and waterfall is not None
    assert [sum(phases.values()) for phases in timing.by_rank] == pytest.approx([timing.step_s] * 2)
    assert timing.by_rank[1]["other"] / timing.step_s == pytest.approx((4 * 0.01 + 0.5) / 2.5)
    assert waterfall.parts["other"] == pytest.approx((0.03, 0.05 + 0.5))
    assert max(map(abs, waterfall.parts[MISSING])) < 0.03


def test_nobody_is_waited_for_where_steps_do_not_need_all(record: RunRecord) -> None:
    timing = measure(record)
    assert timing is not None and timing.communication is not None
    assert (timing.slow, timing.communication.critical, timing.communication.waited_s) == (None, (), 0.0)


def test_what_the_clocks_of_parts_count_twice_is_told() -> None:
    """A window that is longer than the time since the one before."""
    lines = [Start(t=0.0), Steps(10, [1.0] * 10, 2.0, t=2.0), Steps(20, [1.0] * 10, 2.5, t=4.0)]
    whole = whole_run_of(RunRecord("run", lines))
    assert whole is not None and whole.pauses["other"] == pytest.approx(-0.5)
    (said,) = whole_run_words(whole)
    assert said.endswith("4 s: steps 112.5%, less 12.5% that clocks count twice.")
