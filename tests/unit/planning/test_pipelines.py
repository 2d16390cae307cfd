"""Simulated pipelines against schedules worked out by hand, and against their papers' formulas."""

from __future__ import annotations

import time
from fractions import Fraction
from itertools import pairwise

import pytest

from echelon.forecast.simulator import SimulatedTask, makespan, simulate
from echelon.observe.phases import Phase
from echelon.parallel.pipeline.order import computation_order
from echelon.parallel.pipeline.settings import SCHEDULES
from echelon.planning.pipeline_costs import PipelineRun, fit_runs
from echelon.planning.pipelines import StageTimes, idle_shares, pipeline_tasks, places_of
from echelon.records.kinds import PipelineAction, PipelineStep
from echelon.reporting.report.timing import Timing


def times(stages: int, forward: float = 1.0, backward: float = 2.0, **others: float) -> StageTimes:
    """Return equal stages."""
    return StageTimes((forward,) * stages, (backward,) * stages, **others)


def length(schedule: str, count: int, ranks: int, of: StageTimes) -> float:
    return makespan(simulate(pipeline_tasks(schedule, count, ranks, of)))


def drawn(schedule: str, count: int, ranks: int, of: StageTimes) -> list[str]:
    """Return each rank's computations of a unit or two as text: `.` is idle, digits are micro-batches."""
    spans = simulate(pipeline_tasks(schedule, count, ranks, of))
    rows = []
    for rank in range(ranks):
        order = iter(computation_order(schedule, count, ranks, of.stages)[rank])
        row = ["."] * round(makespan(spans))
        for span in spans:
            if span.task.resource == f"processor {rank}" and span.task.name in (Phase.FORWARD, Phase.BACKWARD):
                work = next(order)
                for unit in range(round(span.begin_s), round(span.end_s)):
                    row[unit] = str(work.microbatch) if work.kind == "forward" else "abcdefgh"[work.microbatch]
        rows.append("".join(row))
    return rows


@pytest.mark.parametrize(
    ("schedule", "stages", "by_hand"),
    [
        ("gpipe", 2, ["0123...aabbccdd", ".0123aabbccdd.."]),
        ("1f1b", 2, ["01..aa2bb3cc.dd", ".0aa1bb2cc3dd.."]),
    ],
)
def test_schedules_are_those_drawn_by_hand(schedule: str, stages: int, by_hand: list[str]) -> None:
    """Forward takes a unit, backward two; letters are backwards of the micro-batches a, b, c, d."""
    rows = drawn(schedule, 4, 2, times(stages))
    assert rows == by_hand


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("factor", [2, 4])
def test_equal_stages_take_what_the_papers_say(ranks: int, factor: int) -> None:
    """GPipe and 1F1B (m + p - 1)(F + B); interleaved with v stages a rank, of 1/v of the work each: m v slots and
    p - 1 more of the smaller ones.
    """
    count = ranks * factor
    for schedule in ("gpipe", "1f1b"):
        assert length(schedule, count, ranks, times(ranks)) == 3 * (count + ranks - 1)
    assert length("interleaved", count, ranks, times(2 * ranks)) == 3 * (2 * count + ranks - 1)


def test_zero_bubble_is_the_schedule_worked_out_by_hand() -> None:
    """Two ranks, two stages each, F = I = W = 1: rank 1 begins one unit late and works without a pause."""
    of = times(4)
    tasks = pipeline_tasks("zero_bubble", 4, 2, of)
    spans = simulate(tasks)
    works = [[s for s in spans if s.task.resource == f"processor {rank}" and s.end_s > s.begin_s] for rank in (0, 1)]
    assert [sum(s.end_s - s.begin_s for s in mine) for mine in works] == [24.0, 24.0]
    assert works[1][0].begin_s == 1.0
    assert makespan(spans) == 25.0


@pytest.mark.parametrize("schedule", list(SCHEDULES))
@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_every_schedule_computes_all_of_every_micro_batch_once(schedule: str, count: int) -> None:
    stages = 2 * SCHEDULES[schedule].stages_per_rank
    order = computation_order(schedule, count, 2, stages)
    forwards = sorted((w.stage, w.microbatch) for works in order for w in works if w.kind == "forward")
    assert forwards == [(s, m) for s in range(stages) for m in range(count)]
    for kinds in (("backward", "input"), ("backward", "weight")):
        found = sorted((w.stage, w.microbatch) for works in order for w in works if w.kind in kinds)
        assert found == forwards
    spans = simulate(pipeline_tasks(schedule, count, 2, times(stages)))
    busy = sum(s.end_s - s.begin_s for s in spans)
    assert busy == pytest.approx(3 * stages * count)


def test_messages_and_python_between_lengthen_a_step_by_what_is_worked_out_by_hand() -> None:
    """1F1B, two stages: a micro-batch goes there and back, what lies between takes as long before each computation."""
    one = times(2)
    with_messages = StageTimes(one.forward, one.backward, message_s=0.5)
    assert length("1f1b", 1, 2, one) == 6 and length("1f1b", 1, 2, with_messages) == 7
    with_between = StageTimes(one.forward, one.backward, between_s=0.25)
    assert length("gpipe", 4, 1, times(1)) == 12 and length("gpipe", 4, 1, times(1, between_s=0.25)) == 14
    assert length("1f1b", 1, 2, with_between) == 6.5, "of the last stage it passes while the first one computes"
    around = StageTimes(one.forward, one.backward, before_s=1.0, after_s=2.0, reduce_s=4.0)
    assert length("1f1b", 1, 2, around) == 13


def test_bytes_wait_for_the_senders_link_and_delays_do_not() -> None:
    """GPipe, forwards of a unit: their bytes take 3 each, one after the other, and then 10 on the way, all at once."""
    of = StageTimes((1.0, 1.0), (0.0, 0.0), link_s=(3.0,), message_s=10.0)
    spans = simulate(pipeline_tasks("gpipe", 3, 2, of))
    second = [s.begin_s for s in spans if s.task.resource == "processor 1" and s.task.name == Phase.FORWARD]
    assert second == [14.0, 17.0, 20.0]


def test_a_rank_in_the_middle_sends_both_ways_over_one_link() -> None:
    """Three stages, 1F1B: activations of a later micro-batch wait while a gradient of an earlier one leaves."""
    of = StageTimes((1.0,) * 3, (1.0,) * 3, link_s=(4.0, 4.0))
    sent = [s for s in simulate(pipeline_tasks("1f1b", 4, 3, of)) if s.task.resource == "link 1"]
    sent.sort(key=lambda s: s.begin_s)
    assert len(sent) == 8 and all(a.end_s <= b.begin_s for a, b in pairwise(sent))


def test_the_slowest_of_uneven_stages_decides() -> None:
    """1F1B: the slow one works without a pause from the first activations on; then the first stage has a backward."""
    of = StageTimes((1.0, 3.0, 1.0), (2.0, 6.0, 2.0))
    for count in (4, 8, 16):
        assert length("1f1b", count, 3, of) == 1 + count * 9 + 2


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_one_micro_batch_passes_through_all_stages_and_back(schedule: str) -> None:
    assert length(schedule, 1, 4, times(4)) == 12


def test_replicas_add_up_gradients_behind_the_last_micro_batch_and_then_update() -> None:
    spans = simulate(pipeline_tasks("1f1b", 4, 2, times(2, reduce_s=5.0, after_s=1.0), replicas=2))
    last = max(s.end_s for s in spans if s.task.name == Phase.BACKWARD)
    sums = [s for s in spans if s.task.resource.endswith("replicas")]
    assert {(s.begin_s, s.end_s) for s in sums} == {(last, last + 5)} and makespan(spans) == last + 6


def ran(of: StageTimes, count: int, samples: float) -> PipelineRun:
    """Return what the record of a run would say that took exactly what is simulated."""
    spans = simulate(pipeline_tasks("1f1b", count, 2, of))
    actions = []
    for rank, works in enumerate(computation_order("1f1b", count, 2, 2)):
        mine = [s for s in spans if s.task.resource == f"processor {rank}"]
        mine = [s for s in mine if s.task.name in (Phase.FORWARD, Phase.BACKWARD)]
        for work, span in zip(works, mine, strict=True):
            actions.append(PipelineAction(rank, work.stage, work.microbatch, work.kind, span.begin_s, span.end_s))
    own = {Phase.DATA.value: of.before_s, Phase.UPDATE.value: of.after_s, Phase.OTHER.value: 0.0}
    own[Phase.FORWARD] = sum(of.forward) * count / 2
    own[Phase.BACKWARD] = sum(of.backward) * count / 2
    timing = Timing(10, 5, 0, makespan(spans) + 0.5, 1.0, 0.0, own, (own, own), 0.0, None, 0, ())
    return PipelineRun("a run", 2, 1, samples, timing, (PipelineStep(2, actions, "1f1b", count),))


def test_parts_are_found_again_in_runs_that_have_them() -> None:
    """Uneven stages, with fixed and growing parts; what no part explains (0.5 s) is around the step."""
    runs = []
    for count, samples in ((2, 16.0), (8, 4.0)):
        whole = 0.2 + 0.1 * samples
        of = StageTimes((whole / 4, whole * 3 / 4), (whole / 2, whole), 0.5, 0.01, (0.02 * samples,), 0.05, 0.3, 0.4)
        runs.append(ran(of, count, samples))
    found = fit_runs(runs)
    assert found.forward.fixed_s == pytest.approx(0.2) and found.forward.per_sample_s == pytest.approx(0.1)
    assert found.backward.fixed_s == pytest.approx(0.3) and found.backward.per_sample_s == pytest.approx(0.15)
    assert found.shares[2][0] == pytest.approx((0.25, 0.75)) and found.shares[2][1] == pytest.approx((1 / 3, 2 / 3))
    assert found.between_s == pytest.approx(0.01)
    assert found.message.fixed_s == pytest.approx(0.05) and found.message.per_sample_s == pytest.approx(0.02)
    assert found.update_s == pytest.approx(0.4) and found.around_s == pytest.approx(0.5)


def test_ranks_that_share_a_processor_compute_in_turn() -> None:
    of = times(2)
    tasks = pipeline_tasks("1f1b", 4, 2, of)
    assert makespan(simulate(tasks, places_of(1, 2))) == 24, "all work, one after the other"
    assert makespan(simulate(tasks, places_of(2, 2))) == makespan(simulate(tasks, places_of(0, 2))) == 15
    two = pipeline_tasks("1f1b", 4, 2, of, replicas=2)
    assert makespan(simulate(two, places_of(4, 4))) == 15
    assert 24 <= makespan(simulate(two, places_of(2, 4))) <= 26, "two processors do the work of four"


def test_idle_shares_are_those_of_the_formula() -> None:
    spans = simulate(pipeline_tasks("gpipe", 6, 3, times(3)))
    for share in idle_shares(spans).values():
        assert share == pytest.approx(float(Fraction(2, 8)))


def test_a_pool_serves_who_has_waited_longest() -> None:
    tasks = [
        SimulatedTask("a", "x", 2.0, (), "pool"),
        SimulatedTask("b", "y", 1.0),
        SimulatedTask("c", "y", 1.0, (1,), "pool"),
        SimulatedTask("d", "z", 1.5),
        SimulatedTask("e", "z", 1.0, (3,), "pool"),
    ]
    spans = simulate(tasks, {"pool": 1})
    assert [(s.begin_s, s.end_s) for s in spans] == [(0, 2), (0, 1), (2, 3), (0, 1.5), (3, 4)]
    assert makespan(simulate(tasks)) == 2.5, "a pool that is not named has room for all"


def test_a_deep_pipeline_of_many_micro_batches_is_simulated_in_seconds() -> None:
    began = time.process_time()
    assert length("1f1b", 96, 48, times(48)) == 3 * (96 + 47)
    assert time.process_time() - began < 10
