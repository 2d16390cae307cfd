"""Frequent agreements at a run's start, DiLoCo's outer optimizer by the number of periods, and what a user is told."""

import itertools
from dataclasses import replace

import pytest
import torch

from echelon.compression import read as read_codec
from echelon.sync.averaging.plan import AveragingPlan
from echelon.sync.diloco import DilocoSettings, OuterNesterov
from echelon.sync.local import LocalSettings
from echelon.sync.registry import read


@pytest.mark.parametrize("period", [1, 2, 3, 4, 6, 7, 8, 12, 20, 50])
@pytest.mark.parametrize(("overlap", "fragments"), [(0, 1), (1, 1), (2, 3), (5, 2)])
@pytest.mark.parametrize("steps", [1, 60, 188, 1000])
def test_a_fragment_is_never_taken_while_it_travels(period: int, overlap: int, fragments: int, steps: int) -> None:
    if overlap >= period or fragments > period:
        return
    plan = AveragingPlan(period, overlap=overlap, fragments=fragments, warmup=0.1).for_run(steps)
    for fragment in range(fragments):
        due = [step for step in range(1, steps + 1) if plan.is_due(fragment, step)]
        assert all(later - step > overlap for step, later in itertools.pairwise(due))
    regular = sum(plan.is_due(0, step) for step in range(1, steps + 1))
    assert plan.agreements(steps) == regular
    ends = replace(plan, finishes=True).for_run(steps)
    assert ends.agreements(steps) == regular + (not plan.is_due(0, steps)) and ends.last == steps


def test_the_first_steps_begin_densely() -> None:
    plan = LocalSettings(8).plan().for_run(188)
    assert [step for step in range(1, 65) if plan.is_due(0, step)] == [*range(2, 49, 2), 56, 64]
    assert [LocalSettings(8).plan().for_run(steps).dense for steps in (60, 188, 400, 2000)] == [16, 48, 48, 200]
    late = AveragingPlan(8, overlap=2, alpha=0.5, warmup=0.1).for_run(188)
    assert [step for step in range(1, 33) if late.is_due(0, step)] == [4, 8, 12, 16, 24, 32]
    assert LocalSettings(8, warmup=0).plan().for_run(188).dense == 0
    assert LocalSettings(8).plan().for_run(0).dense == 0
    assert read("local(4)").length_notes(188)[0].startswith("replicas agree after each step in the first 48 of 188")


def test_replicas_that_keep_their_progress_wait_for_means_at_first() -> None:
    plan = LocalSettings(8, overlap=2, warmup=0.1).plan().for_run(188)
    assert plan.dense == 16 and plan.dense_period == 2
    assert [plan.overlap_at(step) for step in (2, 16, 24)] == [0, 0, 2]
    landings = sorted({step + plan.steps_to_landing(step) for step in range(30)})
    assert landings == [2, 4, 6, 8, 10, 12, 14, 16, 26, 34]


def test_what_stays_in_a_replica_needs_no_whole_message_at_first() -> None:
    firsts = {"local(8)": 0, "diloco(8)": 0, "easgd(8)": 1, "diloco(8, overlap=2)": 2, "allreduce": 9}
    for spec, first in firsts.items():
        settled = read(spec).settled(read_codec("sign"), 188)
        whole = settled.codec.whole_steps(settled.messages)
        assert (whole.first, whole.last > 0) == (first, True), spec
    local, topk = read("local(8)"), read_codec("topk(0.01)")
    assert local.settled(topk, 188).codec == topk.for_run(local.messages(188)).codec, "densities rise as elsewhere"
    assert local.settled(read_codec("sign(warmup_steps=3)"), 188).codec.whole_steps(0).first == 3


def test_what_a_normalising_optimizer_loses_is_told() -> None:
    assert read("local(8, 0, keep, 2)") == LocalSettings(8, overlap=2), "the order of what specs have always had"
    [note] = read("local(8)").optimizer_notes("adamw", 4)
    assert note.endswith("up to 2 times smaller; outer_lr=2 or diloco(8) makes up for it")
    quiet = [("local(8)", "sgd"), ("local(8, outer_lr=2)", "adamw"), ("diloco(8)", "adamw")]
    assert not any(read(spec).optimizer_notes(optimizer, 4) for spec, optimizer in quiet)
    with pytest.raises(ValueError, match="outer_lr"):
        LocalSettings(8, outer_lr=0)


@pytest.mark.parametrize(
    ("steps", "expected"), [(188, (1.0, 0.0)), (400, (0.833, 0.5)), (20_000, (0.7, 0.9)), (0, (0.7, 0.9))]
)
def test_the_outer_optimizer_remembers_a_tenth_of_the_run(steps: int, expected: tuple[float, float]) -> None:
    assert DilocoSettings(20).outer(steps) == pytest.approx(expected, abs=1e-3)
    assert DilocoSettings(20, outer_lr=0.5, outer_momentum=0.3).outer(steps) == (0.5, 0.3)


def test_a_longer_run_goes_on_with_the_outer_optimizer_that_it_began_with() -> None:
    began, longer = (OuterNesterov(*DilocoSettings(20).outer(steps)) for steps in (400, 4000))
    longer.load_state_dict(began.state_dict())
    mean = torch.ones(3)
    steps = [rule.agree("w", torch.zeros(3), torch.zeros(3), mean.clone()) for rule in (began, longer)]
    assert torch.equal(*steps)


def test_too_few_periods_are_told() -> None:
    assert any("periods" in note for note in read("easgd(50)").length_notes(188))
    assert not any("may lose" in note for note in read("local(8)").length_notes(188))
    assert ["local(4) 0.3" in note for note in read("local(8, overlap=2)").length_notes(188)] == [False, True]
    assert not any(
        "points" in note for note in [*read("local(4)").length_notes(188), *read("local(8)").length_notes(500)]
    )
    assert not read("allreduce").length_notes(188)
    [said] = read("local(8,warmup=0)").length_notes(12)
    assert said.startswith("12 steps are 1 period of 8") and said.endswith("may lose accuracy: use --sync allreduce")
