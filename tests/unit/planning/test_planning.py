"""Laws of the simulator and of predictions: what is known in closed form, and what grows with what."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echelon.config import build
from echelon.config.machines import Machines, read_at
from echelon.config.validate import CheckpointInterval
from echelon.core.errors import UserError
from echelon.forecast.simulator import SimulatedTask, makespan, simulate
from echelon.observe.phases import Phase
from echelon.planning.calibration import Calibration, MeasuredMemory
from echelon.planning.layouts import DescribedModel, PlannedWay, of_workers
from echelon.planning.page import as_json
from echelon.planning.pictures import front, front_lines, history_lines, scaling_lines, timeline_lines
from echelon.planning.pipeline_costs import PhaseCost, PipelineCosts
from echelon.planning.pipelines import StageTimes, pipeline_tasks
from echelon.planning.plan import Length, make_plan, over_steps, predict, with_targets
from echelon.planning.steps import (
    GATHER_STRETCH,
    GATHERED_S,
    MESSAGE_STRETCH,
    SUM_STRETCH,
    Division,
    Pipelined,
    Replicated,
    Sharded,
    at_division,
    divisions,
    shares_of,
)
from echelon.planning.words import answer_words, choice_words, columns_of, opening, target_columns
from echelon.records.kinds import Alternative
from echelon.run.residuals import Residual
from echelon.run.way_samples import StudySamples, WaySamples, way_of

MINUTE = CheckpointInterval(None, 60.0)
NONE = Alternative({"strategy.compression": "none"}, 1, 4e6, 4.0, 0.0, 0.1)
KNOWN = Calibration(
    source="a run", workers=2, batch=64, samples=(32.0, 32.0),
    phases={
        Phase.DATA: PhaseCost(0.0, 1e-5), Phase.FORWARD: PhaseCost(0.0, 1e-4), Phase.BACKWARD: PhaseCost(0.0, 2e-4),
        Phase.UPDATE: PhaseCost(2e-3, 0.0), Phase.OTHER: PhaseCost(1e-4, 0.0),
    },
    spread=0.8, jitter_s=1e-4, hop_s=1e-4, byte_s=1e-9, ways=(NONE,), parameters=10**6, train_size=6400, epochs=2,
)  # fmt: skip
WAYS = (
    Replicated(NONE),
    Replicated(Alternative({"strategy.sync": "local(period=8)"}, 8, 4e6, 1.0, 0.0, 1.0)),
    Sharded(8, 1, 4),
    Pipelined((0.25, 0.25, 0.25, 0.25), 2, 8, (1000.0,) * 3, 0.25),
)


def slow(rate: str, **more: object) -> Machines:
    """Return eight workers on links of a rate."""
    return replace(read_at(f"workers=8, link={rate}")[0], **more)  # type: ignore[arg-type]


def test_a_resource_does_one_task_at_a_time_and_others_beside_it() -> None:
    tasks = [
        SimulatedTask("a", "x", 1.0),
        SimulatedTask("b", "x", 2.0),
        SimulatedTask("c", "y", 2.5, (0,)),
        SimulatedTask("d", "x", 1.0, (2,)),
    ]
    spans = simulate(tasks)
    assert [(s.begin_s, s.end_s) for s in spans] == [(0.0, 1.0), (1.0, 3.0), (1.0, 3.5), (3.5, 4.5)]


def test_a_circle_and_a_place_that_is_none_are_refused() -> None:
    with pytest.raises(ValueError, match="circle"):
        simulate([SimulatedTask("a", "x", 1.0, (1,)), SimulatedTask("b", "x", 1.0, (0,))])
    with pytest.raises(ValueError, match="none of 1"):
        simulate([SimulatedTask("a", "x", 1.0, (3,))])


@given(st.integers(1, 8), st.integers(1, 16))
@settings(max_examples=60)
def test_a_balanced_pipeline_takes_what_the_formula_says(stages: int, count: int) -> None:
    """1F1B with equal stages: (m + S - 1) micro-batches of forward and backward, as GPipe's."""
    times = StageTimes((1 / stages,) * stages, (2 / stages,) * stages)
    spans = simulate(pipeline_tasks("1f1b", count, stages, times))
    assert makespan(spans) == pytest.approx(3.0 / stages * (count + stages - 1))


def test_the_calibrated_run_is_predicted_as_it_was_measured() -> None:
    """Two workers again: compute, what the link takes beyond backward, and waiting."""
    step = Replicated(NONE).step(KNOWN, Machines("same", 2), 64)
    work = KNOWN.compute(32, 1.0)
    assert step.compute_s == pytest.approx(sum(work.values()))
    assert step.sent_bytes == pytest.approx(NONE.wire_bytes)
    assert step.seconds.low < step.seconds.value < step.seconds.high


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.label)
def test_slower_links_and_devices_never_make_a_step_shorter(way: Replicated | Sharded | Pipelined) -> None:
    rates = ("10gbit", "1gbit", "100mbit", "10mbit")
    steps = [way.step(KNOWN, slow(rate), 64).seconds.value for rate in rates]
    assert steps == sorted(steps)
    assert way.step(KNOWN, slow("1gbit", speed=0.5), 64).seconds.value > steps[1]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.label)
def test_intervals_widen_away_from_what_was_measured(way: Replicated | Sharded | Pipelined) -> None:
    def width(workers: int) -> float:
        interval = way.step(KNOWN, Machines("", workers), 32 * workers).seconds
        return interval.high / interval.low

    assert width(8) < width(64) < width(1024)


def test_a_short_runs_replicas_agree_more_often_than_once_in_a_period() -> None:
    local = Alternative({"strategy.sync": "local(period=8)"}, 8, 4e6, 1.0, 0.0, 1.0)
    shares = {steps: over_steps(local, steps).often for steps in (60, 6000)}
    assert shares[60] > 1.1 * shares[6000] > 1.1 * 1.25 / 8
    on_link = Replicated(over_steps(local, 60)).step(KNOWN, slow("10mbit"), 64)
    assert on_link.communicate_s == pytest.approx(
        8 * shares[60] * Replicated(local).step(KNOWN, slow("10mbit"), 64).communicate_s
    )
    assert over_steps(NONE, 60) == NONE


def test_gloo_gathers_in_turn_with_computing_and_cuts_gradients_up_by_a_whole_sum() -> None:
    machines, way = replace(slow("10mbit"), workers=2), Sharded(2, 1, 4)
    on_cpu = way.step(replace(KNOWN, on_cpu=True), machines, 64)
    half = KNOWN.parameters * 4 / 2
    gathers_s, sum_s = 2 * GATHER_STRETCH * half * 8 / 10e6, SUM_STRETCH * 2 * half * 8 / 10e6
    hops_s = 3 * 4 * (KNOWN.hop_s + GATHERED_S)
    assert on_cpu.communicate_s == pytest.approx(gathers_s + sum_s + hops_s, rel=1e-6)
    assert on_cpu.sent_bytes == 4 * half
    on_gpus = way.step(KNOWN, machines, 64)
    assert on_gpus.sent_bytes == 3 * half and on_gpus.seconds.value < on_cpu.seconds.value


@pytest.mark.parametrize(("sums", "stretch"), [(True, SUM_STRETCH), (False, MESSAGE_STRETCH)])
def test_messages_of_a_codec_take_a_little_longer_than_sums_of_as_many_bytes(sums: bool, stretch: float) -> None:
    machines = replace(slow("1mbit"), workers=2)
    codec = Alternative({"strategy.compression": "int8"}, 1, 1e6, 2.0, 1e-3, 1.0, sums=sums, buckets=1)
    taken_s = Replicated(codec).step(KNOWN, machines, 64).communicate_s
    assert taken_s == pytest.approx(stretch * 1e6 * 8 / 1e6, rel=0.01)


@pytest.mark.parametrize(("sums", "delays"), [(True, 2 * 2 * 7), (False, 2)])
def test_delays_of_a_ring_add_up_and_of_messages_from_each_to_each_do_not(sums: bool, delays: int) -> None:
    codec = Alternative({"strategy.compression": "int8"}, 1, 1.0, 2.0, 1e-9, 1.0, sums=sums, buckets=1)
    near, far = read_at('workers=8, link="1gbit"')[0], read_at('workers=8, link="1gbit,1s"')[0]
    took = [Replicated(codec).step(KNOWN, machines, 64).communicate_s for machines in (near, far)]
    assert took[1] - took[0] == pytest.approx(delays)


def test_on_a_slow_link_the_wire_alone_counts() -> None:
    machines = slow("1mbit")
    step = Replicated(NONE).step(KNOWN, machines, 64)
    wire_s = SUM_STRETCH * NONE.wire_bytes * (2 * 7 / 8) / (2 * 1 / 2) * 8 / 1e6
    assert step.seconds.value == pytest.approx(wire_s, rel=0.01)


def test_a_device_by_its_rate_has_the_links_that_are_told() -> None:
    """Nothing was measured that could hold them up, and a faster device moves no byte faster."""
    rated = replace(KNOWN, precise=False, on_cpu=False, byte_s=1e-11)
    for rate, twice in (("400gbit", "800gbit"), ("1600gbit", "3200gbit")):
        slower, faster = (Replicated(NONE).step(rated, slow(each), 64).communicate_s for each in (rate, twice))
        assert faster < slower
    at = slow("1600gbit")
    bytes_alone = replace(rated, hop_s=0.0, phases={phase: PhaseCost(0.0, 0.0) for phase in Phase})
    one, two = (Replicated(NONE).step(bytes_alone, each, 64).communicate_s for each in (at, replace(at, speed=2.0)))
    assert one == pytest.approx(two)


def test_what_is_worth_renting_is_said() -> None:
    prices = (("workers=8, price=1", 8), ("workers=4, price=1.9", 4), ("workers=2, price=1", 2))
    known = replace(KNOWN, phases={**KNOWN.phases, Phase.BACKWARD: PhaseCost(0.0, 2e-2)})
    machines = [replace(read_at(text)[0], name=str(name)) for text, name in prices]
    words = choice_words(make_plan(known, Length(64, 20, 6400, 0, MINUTE), machines, None))
    assert words[0].startswith("Fastest of these machines: 8:") and words[1].startswith("Cheapest: 2:")
    assert words[2] == "Not worth renting, for another is faster and cheaper: 4."
    alike = [replace(each, name="one") for each in machines]
    assert choice_words(make_plan(known, Length(64, 20, 6400, 0, MINUTE), alike, None))[1].startswith("Cheapest: one:")
    untold = [replace(each, price_per_hour=None) for each in machines]
    [said] = choice_words(make_plan(known, Length(64, 20, 6400, 0, MINUTE), untold, None))
    assert said.endswith("Give each a price=... to know which is worth its money.")
    assert not choice_words(make_plan(known, Length(64, 20, 6400, 0, MINUTE), machines[:1], None))


def test_failures_and_prices_count() -> None:
    length = Length(64, 2, 6400, 2, MINUTE)
    candidate = PlannedWay(Replicated(NONE), {"strategy.parallel": "dp=8"}, exact=True)
    sure, dear = slow("1gbit"), slow("1gbit", price_per_hour=80.0)
    failing = slow("1gbit", mtbf_s=3600.0)
    plain = predict(KNOWN, length, sure, candidate)
    assert plain.money is None
    cost = predict(KNOWN, length, dear, candidate).money
    assert cost is not None and cost.value == pytest.approx(plain.run_s.value * 80 / 3600)
    assert predict(KNOWN, length, failing, candidate).run_s.value > plain.run_s.value
    assert math.isinf(predict(KNOWN, length, slow("1gbit", mtbf_s=1.0), candidate).run_s.value)


def test_what_does_not_fit_is_said() -> None:
    length = Length(64, 2, 6400, 2, MINUTE)
    candidate = PlannedWay(Replicated(NONE), {}, exact=True, memory_bytes=10**9)
    fits = [predict(KNOWN, length, slow("1gbit", memory_bytes=m), candidate).fits for m in (math.inf, 2e9, 1.05e9, 1e9)]
    assert fits == [True, True, False, False]


def test_a_way_that_agrees_too_seldom_in_so_short_a_run_is_not_recommended() -> None:
    seldom = replace(KNOWN, ways=(NONE, Alternative({"strategy.sync": "local(period=8)"}, 8, 4e6, 1.0, 0.0, 1.0)))
    for train_size, best in ((800, "none"), (80_000, "local(period=8)")):
        length = Length(64, 2, train_size, 2, MINUTE)
        (answer,) = make_plan(seldom, length, [slow("10mbit")], None).answers
        assert answer.best[0].label == best
        assert [p.label for p in answer.too_short] == ["local(period=8)"] * (best == "none")
        assert ("agree fewer than 20 times" in " ".join(answer_words(answer))) == (best == "none")
        assert all(change.best.label == best and change.before is answer.best[0] for change in answer.changes[:1])


def test_a_run_is_as_long_as_its_steps_allow() -> None:
    config = build(
        None, {"data.batch_size": "64", "training.epochs": "100", "training.max_steps": "250", "checkpoint.every": "50"}
    ).config
    length = Length.of(config, KNOWN)
    assert (length.steps, length.evaluations) == (250, 3)  # 100 steps an epoch
    assert Length.of(config, KNOWN, epochs=4).steps == 400, "as was asked for"
    assert length.checkpoint_every_s(2.0) == 100.0 and Length(64, 2, 6400, 2, MINUTE).checkpoint_every_s(2.0) == 60.0


def test_checkpoints_by_steps_lose_work_too() -> None:
    candidate, machines = PlannedWay(Replicated(NONE), {}, exact=True), slow("1gbit", mtbf_s=1e5)
    often, rarely = (Length(64, 2, 6400, 2, CheckpointInterval(steps, None)) for steps in (10, 10_000))
    assert (
        predict(KNOWN, often, machines, candidate).run_s.value < predict(KNOWN, rarely, machines, candidate).run_s.value
    )


def test_a_way_for_any_workers_is_cut_over_as_many() -> None:
    way, layout = PlannedWay(Sharded(64, 1, 4), {}, exact=True), PlannedWay(Sharded(8, 2, 4), {}, exact=True)
    assert of_workers(way, 2).way == Sharded(2, 1, 4) and of_workers(layout, 2) == layout


def test_memory_is_forecast_with_what_runs_took_beyond_it() -> None:
    config = build(None, {"model.name": "small_cnn", "data.source": "digits", "optimizer.name": "adamw"}).config
    described, told = DescribedModel.of(config), {"strategy.parallel": "dp=2"}
    alone = {batch: described.memory(told, 2, batch) for batch in (64, 32, 256)}
    described.learn([MeasuredMemory(told, 2, 64, alone[64] + 20e6), MeasuredMemory(told, 2, 32, alone[32] + 16e6)])
    assert [described.memory(told, 2, b) - alone[b] for b in (64, 32, 256)] == [20e6, 16e6, 28e6]  # up to twice as far
    of_four = {"strategy.parallel": "dp=4"}
    assert described.memory(of_four, 4, 128) == pytest.approx(alone[64] + 20e6, rel=0.01)


def test_at_reads_machines() -> None:
    machines = read_at('workers=64, per_machine=8, link="10mbit,20ms", memory=24GB, price=2.5, mtbf=1000h')[0]
    assert (machines.workers, machines.count, machines.memory_bytes) == (64, 8, 24e9)
    assert machines.link is not None and machines.link.delay_s == 0.02
    assert machines.price_per_hour == 160 and machines.mtbf_s == 3.6e6


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("worker=3", "workers"),
        ("workers=0", "above 0"),
        ("workers=4, link=fast", "link"),
        ("workers=4, link=10mbit,20ms", 'write a link with a delay as link="10mbit,20ms"'),
        ("workers=4, memory=3h", "size"),
        ("workers=4, mtbf=1gb", "duration"),
        ("missing.yaml", "no such file"),
        ("link=1gbit", "missing"),
    ],
)
def test_at_refuses_in_words(text: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        read_at(text)


def test_a_file_holds_several(tmp_path: Path) -> None:
    file = tmp_path / "machines.yaml"
    file.write_text('- {workers: 8, link: 1gbit}\n- {workers: 16, link: "10mbit,20ms", price: 2}\n')
    assert [m.workers for m in read_at(str(file))] == [8, 16]


def test_the_largest_of_more_ranks_is_larger() -> None:
    from echelon.planning.calibration import expected_max

    values = [expected_max(n) for n in (1, 2, 4, 64, 10_000)]
    assert values[0] == 0 and all(a < b for a, b in itertools.pairwise(values))


GROUPS = """
- name: mixed
  between: 1gbit
  groups:
    - {name: fast, workers: 4, speed: 3, memory: 24GB, inside: 100gbit, price: 2}
    - {name: slow, workers: 8, speed: 1, memory: 16GB, inside: 50gbit, price: 0.5}
"""


def groups_of(folder: Path, text: str = GROUPS) -> Machines:
    file = folder / "machines.yaml"
    file.write_text(text)
    return read_at(str(file))[0]


def test_groups_of_unlike_workers_are_one_description(tmp_path: Path) -> None:
    machines = groups_of(tmp_path)
    assert (machines.name, machines.workers, machines.count, machines.per_machine) == ("mixed", 12, 2, 4)
    assert (machines.speed, machines.mean_speed, machines.memory_bytes) == (1.0, 20 / 12, 16e9)
    assert machines.price_per_hour == 12 and not machines.are_alike
    assert machines.link is not None and machines.link.rate_bits_per_s == 1e9
    assert machines.inside is not None and machines.inside.rate_bits_per_s == 50e9
    twice = machines.times_as_fast(2)
    assert twice.mean_speed == 2 * machines.mean_speed and twice.speed == 2
    rated = groups_of(tmp_path, GROUPS.replace("speed: 3", "tflops: 30").replace("speed: 1", "tflops: 10"))
    assert rated.tflops == 30 and [round(group.speed, 2) for group in rated.groups] == [1.0, 0.33]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (", price: 2", "", "price is said of some groups"),
        ("speed: 3", "tflops: 3", "tflops is said of some groups"),
        ("between: 1gbit", "link: 1gbit", "link belongs into the groups"),
        ("speed: 1", "sped: 1", "group slow: at has no setting 'sped': did you mean speed"),
        ("workers: 8", "workers: 0", "group slow: workers must be above 0"),
        ("speed: 3", "speed: -3", "group fast: speed must be above 0"),
    ],
)
def test_groups_refuse_in_words(tmp_path: Path, old: str, new: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        groups_of(tmp_path, GROUPS.replace(old, new))


def test_an_empty_list_of_groups_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="groups must be a list of one or more"):
        groups_of(tmp_path, "- {name: mixed, groups: []}")


def test_without_a_study_the_plan_says_that_time_to_an_accuracy_is_not_known() -> None:
    plan = with_targets(make_plan(KNOWN, Length(64, 2, 6400, 2, MINUTE), read_at("workers=8"), None), None)
    assert any("No study of this model and data" in line for line in opening(plan))
    assert all(p.to_target is None for answer in plan.answers for p in answer.predictions)


def test_parts_by_speed_are_done_together_and_faster_than_equal_ones(tmp_path: Path) -> None:
    machines, batch = groups_of(tmp_path), 1200
    shares = shares_of(KNOWN, machines, batch)
    assert sum(n * group.workers for n, group in zip(shares, machines.groups, strict=True)) == pytest.approx(batch)
    done_s = [sum(KNOWN.compute(n, group.speed).values()) for n, group in zip(shares, machines.groups, strict=True)]
    assert done_s[0] == pytest.approx(done_s[1])
    steps = {
        division: Replicated(NONE).step(KNOWN, at_division(machines, division), batch)
        for division in (Division.BY_SPEED, Division.EQUAL)
    }
    assert steps[Division.BY_SPEED].compute_s == pytest.approx(done_s[0])
    assert steps[Division.BY_SPEED].seconds.value < steps[Division.EQUAL].seconds.value
    assert not shares_of(KNOWN, machines, 12), "a slow worker would have less than a sample"


def test_ways_that_cannot_have_parts_by_speed_go_at_the_pace_of_the_slowest(tmp_path: Path) -> None:
    machines = groups_of(tmp_path)
    slowest, both = (Division.EQUAL,), (Division.BY_SPEED, Division.EQUAL)
    for way, expected in (
        (Replicated(NONE), both),
        (Sharded(12, 1, 4), slowest),  # one replica, whose ranks do each step together
        (Sharded(4, 3, 4), both),
        (Sharded(6, 2, 4), slowest),  # a replica of fast and slow ones
        (WAYS[3], slowest),
    ):
        assert divisions(KNOWN, machines, 1200, way) == expected, way
    (answer,) = make_plan(KNOWN, Length(1200, 2, 6400, 2, MINUTE), [machines], None).answers
    assert answer.best[0].division is Division.BY_SPEED
    assert any("Parts of a batch go by speed (--balance auto): " in line for line in answer_words(answer))


def test_memory_of_each_group_counts(tmp_path: Path) -> None:
    machines, length = groups_of(tmp_path), Length(1200, 2, 6400, 2, MINUTE)
    fits = PlannedWay(Replicated(NONE), {}, True, memory_bytes=10**9, by_group=(20 * 10**9, 10**9), memory_off=0.1)
    by_speed = predict(KNOWN, length, machines, fits)
    assert by_speed.fits and by_speed.division is Division.BY_SPEED
    memory = fits.memory(Division.BY_SPEED)
    assert memory is not None and (memory.value, memory.high) == (20e9, 22e9)
    too_large = replace(fits, by_group=(23 * 10**9, 10**9))
    equal = predict(KNOWN, length, machines, too_large)
    assert equal.fits and equal.division is Division.EQUAL, "equal parts fit"


def test_a_price_of_nothing_is_free_and_none_is_not_said() -> None:
    length, candidate = Length(64, 2, 6400, 2, MINUTE), PlannedWay(Replicated(NONE), {}, exact=True)
    free, untold = (predict(KNOWN, length, read_at(text)[0], candidate) for text in ("workers=8, price=0", "workers=8"))
    assert free.money is not None and free.money.value == 0 and untold.money is None
    (answer,) = make_plan(KNOWN, length, read_at("workers=8, price=0"), None).answers
    assert answer_words(answer)[0].endswith(", free.")
    assert columns_of(answer.predictions)[-1].cells == ["free"]
    report = make_plan(KNOWN, length, [*read_at("workers=8, price=0"), *read_at("workers=4, price=3")], None)
    assert not any("Give each a price" in line for line in choice_words(report))


def test_intervals_of_memory_widen_away_from_what_was_measured() -> None:
    config = build(None, {"model.name": "small_cnn", "data.source": "digits"}).config
    described, whole = DescribedModel.of(config), Replicated(NONE)
    unmeasured = described.memory_off(whole, 32)
    described.learn([MeasuredMemory({"strategy.parallel": "dp=2"}, 2, 64, 1e9)])
    measured = described.memory_off(whole, 32)
    assert measured < unmeasured
    assert measured < described.memory_off(whole, 64) < described.memory_off(whole, 256)
    assert measured < described.memory_off(Sharded(8, 1, 4), 32)
    assert measured < described.memory_off(WAYS[1], 32), "averages come on top of the peak in part"
    least = PlannedWay(whole, {}, True, memory_bytes=100, unknown="values matter").memory()
    assert least is not None and math.isinf(least.high)


SAMPLES = StudySamples(
    study="mine", target="accuracy 95.00%", first="none", epochs=4.0, low=3.8, high=4.2, workers=2, batch=64,
    ways=(
        WaySamples("none", way_of({}), 1.0, 1.0, 1.0, 3, 3),
        WaySamples("local", way_of({"strategy.sync": "local(8)"}), 1.5, 1.2, 1.8, 3, 3),
        WaySamples("int8", way_of({"strategy.compression": "int8"}), math.inf, None, None, 0, 3),
    ),
)  # fmt: skip


def test_time_to_a_target_is_samples_of_the_study_at_the_predicted_pace() -> None:
    local = Alternative({"strategy.sync": "local(period=8)"}, 8, 4e6, 1.0, 0.0, 1.0)
    int8 = Alternative({"strategy.compression": "int8"}, 1, 1e6, 4.0, 1e-3, 0.1)
    sign = Alternative({"strategy.compression": "sign"}, 1, 1e5, 4.0, 1e-3, 0.1)
    known = replace(KNOWN, ways=(NONE, local, int8, sign))
    length = Length(64, 40, 6400, 40, MINUTE)
    plan = with_targets(make_plan(known, length, [slow("100mbit")], None), SAMPLES)
    (answer,) = plan.answers
    found = {p.label: p.to_target for p in answer.predictions}
    none, averaged = found["none"], found["local(period=8)"]
    assert none is not None and averaged is not None and none.epochs is not None and none.seconds is not None
    step_s = next(p for p in answer.predictions if p.label == "none").step.seconds.value
    assert none.epochs.value == 4.0 and none.seconds.value == pytest.approx(4 * 100 * step_s, rel=0.01)
    assert averaged.epochs is not None and averaged.epochs.value == 6.0
    assert averaged.epochs.high / 6.0 > none.epochs.high / 4.0
    never, unknown = found["int8"], found["sign"]
    assert never is not None and never.seconds is not None and math.isinf(never.seconds.value)
    assert unknown is not None and unknown.seconds is None and unknown.reason == "not in the study"
    words = " ".join(answer_words(answer))
    assert (
        "Fastest to the target: " in words
        and "Not in the study, so that time to the target is not known: sign." in words
    )
    cells = [column.cells for column in target_columns(answer.predictions, SAMPLES)]
    assert len(cells[0]) == 3 and "reached in 0 of 3 seeds" in cells[-1]
    assert as_json(plan)["study"] == "mine"


def test_few_seeds_leave_the_bounds_of_time_to_a_target_open() -> None:
    few = replace(SAMPLES, low=None, high=None)
    plan = with_targets(make_plan(KNOWN, Length(64, 40, 6400, 40, MINUTE), [slow("1gbit")], None), few)
    target = plan.answers[0].predictions[0].to_target
    assert target is not None and target.seconds is not None and math.isinf(target.seconds.high)


def test_pictures_in_characters_are_ascii_and_80_columns_wide(tmp_path: Path) -> None:
    known = replace(KNOWN, ways=(NONE, Alternative({"strategy.sync": "local(period=8)"}, 8, 4e6, 1.0, 0.0, 1.0)))
    machines = [*read_at("workers=8, link=1gbit, price=2"), replace(groups_of(tmp_path), name="mixed" * 20)]
    plan = make_plan(known, Length(1200, 20, 64000, 2, MINUTE), machines, None)
    way = replace(plan.answers[0].predictions[0], step=WAYS[3].step(KNOWN, machines[0], 64))
    residuals = [Residual(float(n), "run", "int8", 0.1 * (1 + n / 10), 0.1) for n in range(6)]
    pictures = [*(scaling_lines(plan, answer) for answer in plan.answers), front_lines(plan), timeline_lines(way),
                history_lines(residuals)]  # fmt: skip
    for lines in pictures:
        assert len(lines) > 4
        assert all(line.isascii() and len(line) <= 80 for line in lines), lines
    steps = pictures[3]
    assert len([line for line in steps if line.strip().startswith("processor")]) == 4
    free = make_plan(known, plan.length, read_at("workers=8, price=0"), None)
    assert not front_lines(free) and not history_lines(residuals[:1])


def test_the_front_holds_what_nothing_beats(tmp_path: Path) -> None:
    texts = ("workers=8, price=1", "workers=4, price=1", "workers=2, price=9")
    known = replace(KNOWN, phases={**KNOWN.phases, Phase.BACKWARD: PhaseCost(0.0, 2e-2)})
    plan = make_plan(known, Length(64, 20, 6400, 0, MINUTE), [read_at(text)[0] for text in texts], None)
    points = [(way.run_s.value, way.money.value) for _, way in front(plan) if way.money is not None]
    assert (
        points
        and points == sorted(points)
        and [cost for _, cost in points] == sorted((cost for _, cost in points), reverse=True)
    )
    every = [(p.run_s.value, p.money.value) for a in plan.answers for p in a.predictions if p.money is not None]
    assert all(any(s <= t and c <= d for s, c in points) for t, d in every)


def test_a_period_that_follows_the_link_is_longer_over_a_slow_one() -> None:
    way = Alternative({"strategy.sync": "local(period=auto)"}, 100, 1e6, 2, 0.0, 1.0, follows=0.1)
    assert way.often_beside(0.1, 0.1) == pytest.approx(1 / 9), "a tenth of the time"
    assert way.often_beside(0.1, 100.0) == way.often == 1 / 100, "the longest that leaves a run enough averages"
    assert way.often_beside(0.1, 0.001) == way.often_beside(0.1, 0.0) == 1
    assert over_steps(way, 20_000).period == 500 > over_steps(way, 600).period > over_steps(way, 60).period


def test_a_pipeline_takes_longer_over_a_slower_link_and_on_fewer_processors() -> None:
    """Its bubble grows with the link's time; two processors cannot do the work of four ranks in less than its half."""
    way = Pipelined((0.25,) * 4, 1, 8, (1e5,) * 3, 0.25)
    steps = [way.step(KNOWN, read_at(f"workers=4, link={link}")[0], 64) for link in ("100gbit", "100mbit", "10mbit")]
    assert steps[0].seconds.value < steps[1].seconds.value < steps[2].seconds.value
    bubbles = [step.bubble or 0.0 for step in steps]
    assert 3 / 11 <= bubbles[0] < bubbles[1] < bubbles[2], "(S - 1) / (m + S - 1) without messages"
    assert steps[0].sent_bytes == 2 * 1e5 * 64
    nothing_sent, at_once = replace(way, passed_bytes=(0.0,) * 3), replace(KNOWN, hop_s=0.0)
    alone, shared = (
        nothing_sent.step(at_once, read_at(f"workers=4, per_machine=4, processors={count}")[0], 64).seconds.value
        for count in (4, 2)
    )
    work = 64 * (1e-4 + 2e-4) / 2
    assert alone < work < shared < 2 * alone


def test_what_pipelines_were_measured_to_take_replaces_what_replicas_tell() -> None:
    """Between computations and around the step; the interval is narrower, and wider again for more stages."""
    costs = PipelineCosts(
        "a run", KNOWN.phases[Phase.FORWARD], KNOWN.phases[Phase.BACKWARD], 1e-3, PhaseCost(1e-3, 0.0),
        PhaseCost(0.0, 0.0), 2e-3, 5e-3, 2, {2: ((0.5, 0.5), (0.5, 0.5))}, None, (4.0, 16.0),
    )  # fmt: skip
    two, four = Pipelined((0.5,) * 2, 1, 8, (1e3,), 0.5), Pipelined((0.25,) * 4, 1, 8, (1e3,) * 3, 0.25)
    known, machines = replace(KNOWN, pipelines=costs), Machines("here", 2)
    told, measured, deeper = (
        way.step(of, each, 64).seconds
        for way, of, each in (
            (two, KNOWN, machines),
            (two, known, machines),
            (four, known, replace(machines, workers=4)),
        )
    )
    assert measured.value > told.value + 5e-3
    widths = [each.high / each.value for each in (measured, deeper, told)]
    assert widths[0] < widths[1] < widths[2]


def test_bubbles_are_told_of_pipelines_alone() -> None:
    machines, length = Machines("here", 4), Length(64, 1, 640, 1, CheckpointInterval(None, None))
    ways = (Replicated(NONE), Pipelined((0.25,) * 4, 1, 8, (1e3,) * 3, 0.25))
    found = [predict(KNOWN, length, machines, PlannedWay(way, {}, exact=True)) for way in ways]
    column = next(column for column in columns_of(found) if column.head == "bubble")
    assert column.cells[0] == "" and column.cells[1].endswith("%")
    assert all(column.head != "bubble" for column in columns_of(found[:1]))
