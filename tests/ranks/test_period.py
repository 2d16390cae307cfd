"""`period=auto` in real runs: links that change, runs that go on across a decision, workers that die around one."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from torch import Tensor

from echelon.launch.link import ShapedNetwork, parse_link
from tests.ranks.counting_parts import EPOCHS, moved
from tests.ranks.links import NEEDS_LINKS, start_machine
from tests.ranks.replicas import Trial, copy, load, make_parts, save, train
from tests.ranks.runs import SMALL, Runs
from tests.ranks.spawn import Rank, run_ranks
from tests.ranks.test_elastic import Case, check_recorded, start

pytestmark = pytest.mark.timeout(600)
STEPS = 100  # in so short a run an average of the tiny model asks for a longer period than there may be
TRIALS = [
    Trial("local(auto)", momentum=0.9, steps=STEPS),
    Trial("local(auto, start=3)", "sign", momentum=0.9, steps=STEPS + 3),
    Trial("diloco(auto)", "int8", momentum=0.9, steps=STEPS),
]


def _equal(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def _across_a_decision(rank: Rank) -> list[tuple[int, int]]:
    """Save before a decision and after it, within periods; go on, and from what was saved: the same bits? Returns the
    periods before the decision and at the end.
    """
    periods = []
    for trial in TRIALS:
        first = trial.steps - STEPS
        for at in (first + 3, first + 5, first + 40):
            parts = make_parts(trial)
            train(parts, rank, 0, at)
            saved = save(parts, rank, at)
            began = saved[1]["sync"]["period"]["period"]
            expected = train(parts, rank, at, trial.steps)
            again = make_parts(trial)
            load(again, rank, saved)
            for step, (a, b) in enumerate(zip(expected, train(again, rank, at, trial.steps), strict=True), at):
                assert _equal(a, b), f"{trial} resumed at step {at} differs at step {step}"
            ends = [p.sync.state_dict()["period"]["period"] for p in (parts, again)]
            assert ends[0] == ends[1]
            periods.append((began, ends[0]))
            for p in (parts, again):
                with p.sync.agreed():
                    agreed = copy(p.model.state_dict())
                assert _equal(agreed, p.model.state_dict()) or trial.compression == "sign"
                p.sync.close()
    return periods


def test_resume_across_a_decision_is_bit_identical() -> None:
    """In so short a run all decisions are the same whatever the clock says: the longest period that it may have."""
    here, there = run_ranks(_across_a_decision, 2)
    assert here == there, "all ranks decide alike"
    assert here == [(4, 8), (8, 8), (8, 8)] * len(TRIALS)


DEATHS = (
    ("local(auto)", Case("before the first decision", 3, (("rank1.0", "backward", 4),))),
    ("local(auto)", Case("in the average that decides", 3, (("rank2.0", "average, in it", 4),))),
    ("local(auto)", Case("the one that leads, with the mean that decides", 3, (("rank0.0", "averaged", 4),))),
    ("local(auto)", Case("after the decision", 2, (("rank1.0", "backward", 9),))),
    ("local(auto, overlap=1)", Case("while a mean travels", 3, (("rank1.0", "backward", 14),))),
    ("diloco(auto, outer_lr=1, outer_momentum=0)", Case("as averages decide", 3, (("rank1.0", "averaged", 4),))),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("sync", "case"), [pytest.param(*death, id=f"{death[0]} {death[1].name}") for death in DEATHS])
def test_survivors_of_a_worker_go_on_across_a_decision(sync: str, case: Case, tmp_path: Path) -> None:
    """Each weight moves once an epoch, and the record tells of each change, whoever led when it was decided."""
    with Runs(tmp_path) as runs:
        run = start(runs, case, f"sync={sync}", pace_s=0.1)
        assert run.end() == 0, run.text()[-3000:]
        assert run.events("worker_died") and not run.events("resumed")
        check_recorded(run)
        weights = moved(run.folder)
        assert torch.allclose(weights, torch.full_like(weights, EPOCHS), atol=1e-9), run.text()[-3000:]
        changes = run.events("period_changed")
        assert [change["old"] for change in changes[1:]] == [change["new"] for change in changes[:-1]]


@pytest.mark.long
def test_a_killed_run_goes_on_from_its_checkpoint_with_what_was_decided(tmp_path: Path) -> None:
    with Runs(tmp_path) as runs:
        run = runs.train("digits", "--model", "mlp", "--workers", "2", "--sync", "local(auto)", "--epochs", "20",
                         "--checkpoint-every", "10", "--elastic", "off", *SMALL, folder="run")  # fmt: skip
        run.wait_for_step(40)
        os.kill(run.pids()[1], signal.SIGKILL)
        assert run.end() == 0, run.text()[-3000:]
        (resumed,) = run.events("resumed")
        before = [c for c in run.events("period_changed") if c["t"] < resumed["t"]]
        after = [c for c in run.events("period_changed") if c["t"] >= resumed["t"]]
    assert before and before[0]["old"] == 4
    known = [c["new"] for c in before if c["step"] <= resumed["step"]]
    assert known and (not after or after[0]["old"] == known[-1]), "the controller did not start anew"
    again = [(c["step"], c["new"]) for c in before if c["step"] > resumed["step"]]
    assert [(c["step"], c["new"]) for c in after][: len(again)] == again, "what the record has is decided again"


@pytest.mark.parametrize(
    "sync", [pytest.param(sync, marks=[*NEEDS_LINKS, pytest.mark.long]) for sync in ("local(auto)", "diloco(auto)")]
)
def test_the_period_follows_a_link_that_changes(sync: str, tmp_path: Path) -> None:
    common = ("--model", "mlp", "--nodes", "2", "--sync", sync, "--epochs", "1000", "--eval-every", "0")
    with Runs(tmp_path) as runs, ShapedNetwork(2, parse_link("1gbit")) as network:
        first, second = (start_machine(runs, network, i, *common, folder="run") for i in range(2))

        def period() -> int:
            """Return the period that was recorded last."""
            changes = first.events("period_changed")
            return int(changes[-1]["new"]) if changes else 0

        fast = first.wait_for(period, "a first decision")
        network.reshape(parse_link("2mbit"))
        first.wait_for(lambda: period() > 3 * fast, "a longer period")
        slow = period()
        network.reshape(parse_link("1gbit"))
        first.wait_for(lambda: period() < slow / 2, "a shorter period again")
        said = first.events("period_changed")
        for run in (first, second):
            os.kill(run.process.pid, signal.SIGINT)
        for run in (first, second):
            run.end()
    assert all("an average takes" in change["reason"] for change in said)
