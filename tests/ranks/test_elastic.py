"""Survivors of a killed worker go on: nothing is restarted, and each sample of each epoch is trained exactly once."""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.ranks.counting_parts import EPOCHS, FAULTS, LEFT, PACE, STEPS, WIDTH, left_behind, moved, waiting
from tests.ranks.run_many import python_path
from tests.ranks.runs import Run, Runs

pytestmark = pytest.mark.timeout(600)


@dataclass(frozen=True)
class Case:
    """Which members die where, of how many workers: (member, point, how often it has come there)."""

    name: str
    workers: int
    faults: tuple[tuple[str, str, int], ...]

    @property
    def mark(self) -> pytest.MarkDecorator:
        """Deaths in the phases that differ most are long tests; the points between them are slow ones."""
        return pytest.mark.long if self.name in IN_EACH_PHASE else pytest.mark.slow


IN_EACH_PHASE = ("in a sum", "between the halves of a sum", "the one that leads between averages")
CASES = (
    Case("in forward", 2, (("rank1.0", "forward", 5),)),
    Case("in backward, before its gradient is summed", 3, (("rank1.0", "backward", 6),)),
    Case("in a sum", 3, (("rank2.0", "sum", 7),)),
    Case("before the update", 3, (("rank1.0", "before update", 9),)),
    Case("after the update", 2, (("rank1.0", "after update", 9),)),
    Case("in an evaluation", 3, (("rank1.0", "evaluation", 2),)),
    Case("while a checkpoint is taken", 3, (("rank0.0", "state", 1),)),
    Case("the one that leads", 3, (("rank0.0", "forward", 12),)),
    Case("two at once", 4, (("rank1.0", "backward", 6), ("rank3.0", "backward", 6))),
    Case("one after the other", 3, (("rank1.0", "backward", 6), ("rank2.0", "forward", 8))),
    Case("one as the others begin a term without another", 3, (("rank1.0", "backward", 6), ("rank2.0", "window", 1))),
)


def start(runs: Runs, case: Case, *settings: str, pace_s: float = 0.0, width: int = 1) -> Run:
    """Start a counting run with the faults of a case."""
    environment = {FAULTS: json.dumps(case.faults), PACE: str(pace_s), WIDTH: str(width)}
    if width > 1:
        environment[LEFT] = str(runs.root)
    environment["PYTHONPATH"] = python_path()
    folder = runs.root / "run"
    program = (sys.executable, "-m", "tests.ranks.counting_parts", str(folder), str(case.workers), *settings)
    return runs.start(folder="run", program=program, environment=environment)


def check_counted(run: Run) -> None:
    """Check that each weight has moved once an epoch, and each step is recorded once."""
    text = run.text()[-3000:]
    assert torch.equal(moved(run.folder), torch.full_like(moved(run.folder), EPOCHS)), text
    check_recorded(run)


def check_recorded(run: Run, count: int = STEPS) -> None:
    """Check that each step is recorded once."""
    text = run.text()[-3000:]
    steps = [step for r in run.records("steps") for step in range(r["step"] - len(r["losses"]) + 1, r["step"] + 1)]
    assert steps == list(range(1, count + 1)), text


@pytest.mark.parametrize("case", [pytest.param(case, marks=case.mark, id=case.name) for case in CASES])
def test_every_sample_counts_once_whoever_dies_where(case: Case, tmp_path: Path) -> None:
    with Runs(tmp_path) as runs:
        run = start(runs, case, "checkpoint_every=3")
        assert run.end() == 0, run.text()[-3000:]
        check_counted(run)
        deaths = run.events("worker_died")  # more of them where gloo does not notice a broken connection: it ends then
        assert len(deaths) >= len(case.faults) and all("the others go on" in d["message"] for d in deaths)
        assert not run.events("resumed") and run.records("start")[0]["attempt"] == 0


@pytest.mark.long
def test_who_is_stopped_is_ended_by_a_deadline_of_its_own_rhythm(tmp_path: Path) -> None:
    """Rank 1 is stopped (SIGSTOP) in a forward pass: the others have not lost it, and would wait for --timeout."""
    with Runs(tmp_path) as runs:
        run = start(runs, Case("stopped", 3, (("rank1.0", "forward, stopped", 12),)), "timeout=300s", pace_s=0.1)
        assert run.end() == 0, run.text()[-3000:]
        check_counted(run)
        death = run.events("worker_died")[0]
        before = max(r["t"] for r in run.records("steps") if r["t"] < death["t"])
        assert "has been stopped (SIGSTOP) for" in death["message"] and "the others go on" in death["message"]
        assert death["t"] - before < 20.0, death  # 2 s and the looks, on a busy machine


@pytest.mark.slow
def test_who_dies_before_all_of_a_term_are_connected_is_not_waited_for(tmp_path: Path) -> None:
    with Runs(tmp_path) as runs:
        case = Case("as it connects", 3, (("rank1.0", "backward", 6), ("rank2.0", "enter", 1)))
        run = start(runs, case, "timeout=200s", pace_s=0.3)
        assert run.end() == 0, run.text()[-3000:]
        check_counted(run)
        death, (_, alone, *later) = run.events("worker_died")[0], run.records("start")
        assert alone["world_size"] == 1 and alone["t"] - death["t"] < 60.0, run.text()[-3000:]
        assert later and later[-1]["t"] - alone["t"] < 100.0 and not run.events("resumed"), run.text()[-3000:]


CODED = (
    ("topk(0.05, warmup_steps=0, finish_steps=0)", Case("between the halves of a sum", 3, (("rank2.0", "spread", 7),))),
    ("topk(0.05, warmup_steps=0, finish_steps=0)", Case("alone from then on", 2, (("rank1.0", "collect", 9),))),
    ("powersgd(2, warmup_steps=0, finish_steps=0)", Case("after the update", 3, (("rank0.0", "after update", 9),))),
)


@pytest.mark.parametrize(
    ("codec", "case"), [pytest.param(codec, case, marks=case.mark, id=f"{codec} {case.name}") for codec, case in CODED]
)
def test_survivors_keep_what_their_codecs_have_not_sent(codec: str, case: Case, tmp_path: Path) -> None:
    """What has moved, what waits and what waited in the dead ones' memories is each sample once an epoch."""
    with Runs(tmp_path) as runs:
        run = start(runs, case, f"compression={codec}", width=32)
        assert run.end() == 0, run.text()[-3000:]
        check_recorded(run)
        counted = moved(run.folder) + waiting(run.folder)
        missing = EPOCHS - counted
        text = run.text()[-3000:]
        if codec.startswith("topk"):
            left = left_behind(tmp_path)
            assert len(left) == len(case.faults)
            # Of a step that was done again the dead one's part was, too: what it had remembered before it is missing.
            errors = [(missing - sum(each)).abs().max() for each in itertools.product(*left)]
            assert len(run.events("worker_died")) > len(left) or min(errors) < 1e-6, (errors, text)
            assert missing.min() > -0.01, text  # none counts twice, but for rounding of what is sent
        elif len(run.events("worker_died")) == len(case.faults):  # else one more memory is lost, which nobody has kept
            # Each rank remembers its own gradient without the mean of all: the dead one's last, here.
            assert missing.min() > -0.34 and missing.max() < 0.67, text
        assert any("had not sent yet is lost" in event["message"] for event in run.events("members"))


ROUNDS = (
    ("local(4)", Case("in the midst of a round", 3, (("rank1.0", "backward", 7),))),
    (
        "diloco(4, outer_lr=1, outer_momentum=0)",
        Case("the one that leads between averages", 3, (("rank0.0", "forward", 12),)),
    ),
    ("easgd(4)", Case("alone from then on", 2, (("rank1.0", "after update", 10),))),
)


@pytest.mark.parametrize(
    ("sync", "case"), [pytest.param(sync, case, marks=case.mark, id=f"{sync} {case.name}") for sync, case in ROUNDS]
)
def test_a_round_that_lost_a_replica_is_trained_again(sync: str, case: Case, tmp_path: Path) -> None:
    """With equal shares a mean of replicas moves each weight once an epoch, whatever died; a centre follows behind."""
    with Runs(tmp_path) as runs:
        run = start(runs, case, f"sync={sync}")
        assert run.end() == 0, run.text()[-3000:]
        assert not run.events("resumed") and len(run.events("worker_died")) >= 1
        check_recorded(run)
        if not sync.startswith("easgd"):
            weights = moved(run.folder)
            assert torch.allclose(weights, torch.full_like(weights, EPOCHS), atol=1e-9), run.text()[-3000:]
        else:
            assert moved(run.folder).min() > 0 and moved(run.folder).max() <= EPOCHS + 1e-9
