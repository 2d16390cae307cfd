"""Survivors of a killed worker go on: nothing is restarted, and each sample of each epoch is trained exactly once."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from echelon.checkpoint import RANKS
from echelon.checkpoint.tree import flatten
from echelon.trainer.saving import state_of
from tests.ranks.counting_parts import (
    BATCH,
    EPOCHS,
    FAULTS,
    LAYERS,
    LEFT,
    OVERFLOWS,
    PACE,
    SAMPLES,
    SPEEDS,
    STEPS,
    TABLES,
    WIDTH,
    left_behind,
    moved,
    waiting,
)
from tests.ranks.drawing_parts import DRAWS, NOTES, notes_of
from tests.ranks.run_many import python_path
from tests.ranks.runs import SMALL, Run, Runs

pytestmark = pytest.mark.timeout(600)


@dataclass(frozen=True)
class Case:
    """Which members die where, of how many workers: (member, point, how often it has come there)."""

    name: str
    workers: int
    faults: tuple[tuple[str, str, int], ...]
    pace_s: float = 0.0
    layers: int = 1

    @property
    def mark(self) -> pytest.MarkDecorator:
        """Deaths in the phases that differ most are long tests; the points between them are slow ones."""
        return pytest.mark.long if self.name in IN_EACH_PHASE else pytest.mark.slow


AND_BACK = (("rank1.0", "backward", 6), ("rank0.0", "forward, waits", 8))  # rank 1 dies, and rank 0 waits for it
ONE_COMES = (("rank1.0", "backward", 6), ("rank0.0", "forward, waits", 13))  # in the midst of an epoch
OF_A_BUCKET = 1600  # float64 weights a sample: DDP's first bucket is full with 1 MiB
NO_SPEEDS: Mapping[str, float] = {}
IN_EACH_PHASE = (
    "in a sum", "between the halves of a sum", "the one that leads between averages", "in the sum of an average",
    "while a mean travels", "along a path of ours", "the one that leads, as it gives what is trained",
    "the one that leads, before it seals a checkpoint",
)  # fmt: skip
CASES = (
    Case("in forward", 2, (("rank1.0", "forward", 5),)),
    Case("in backward, before its gradient is summed", 3, (("rank1.0", "backward", 6),)),
    Case("some time in a step", 3, (("rank2.0", "sum", 7),)),
    Case("before the second sum", 3, (("rank2.0", "bucket", 7),), layers=3),
    Case("in a sum", 3, (("rank2.0", "bucket, in it", 7),), layers=3),
    Case("with all sums, as others may be", 3, (("rank0.0", "summed bucket", 7),), layers=3),
    Case("before the update", 3, (("rank1.0", "before update", 9),)),
    Case("after the update", 2, (("rank1.0", "after update", 9),)),
    Case("in an evaluation", 3, (("rank1.0", "evaluation", 2),)),
    Case("while a checkpoint is taken", 3, (("rank0.0", "state", 1),)),
    Case("while it writes its part of a checkpoint", 3, (("rank2.0", "part", 2),)),
    Case("the one that leads, while it writes its part", 3, (("rank0.0", "part", 2),)),
    Case("the one that leads, before it seals a checkpoint", 3, (("rank0.0", "manifest", 2),)),
    Case("the one that leads, once it has sealed it", 2, (("rank0.0", "sealed", 2),)),
    Case("the one that leads", 3, (("rank0.0", "forward", 12),)),
    Case("two at once", 4, (("rank1.0", "backward", 6), ("rank3.0", "backward", 6))),
    Case("one after the other", 3, (("rank1.0", "backward", 6), ("rank2.0", "forward", 8))),
    Case("one as the others begin a term without another", 3, (("rank1.0", "backward", 6), ("rank2.0", "window", 1))),
)
IN_RECOVERY = (
    ("allreduce", Case("as it tells where it is", 3, (("rank1.0", "backward", 6), ("rank2.0", "told", 1)))),
    ("allreduce", Case("the one that leads, as it gives what is trained", 3, (*AND_BACK, ("rank0.0", "sends", 1)))),
    ("allreduce", Case("once it has given", 3, (*AND_BACK, ("rank0.0", "sent", 1)))),
    ("allreduce", Case("a newcomer as it receives", 3, (*AND_BACK, ("rank1.1", "receives", 1)))),
    ("allreduce", Case("a newcomer that has received", 2, (*AND_BACK, ("rank1.1", "received", 1)))),
    ("allreduce", Case("the other, soon after one has come", 2, (*ONE_COMES, ("rank0.0", "forward", 15)), pace_s=0.3)),
    ("local(4)", Case("the one that leads, as it gives", 3, (*AND_BACK, ("rank0.0", "sends", 1)))),
    ("local(4)", Case("a newcomer that has received", 3, (*AND_BACK, ("rank1.1", "received", 1)))),
)


def start(
    runs: Runs,
    case: Case,
    *settings: str,
    pace_s: float = 0.0,
    width: int = 1,
    speeds: Mapping[str, float] = NO_SPEEDS,
    overflows: int = -1,
    tables: int = 0,
) -> Run:
    """Start a counting run with the faults of a case.

    Args:
        tables: with sparse gradients.
        speeds: seconds that a member needs for a sample.
        overflows: a sample whose gradient is infinite.
    """
    environment = {
        FAULTS: json.dumps(case.faults), PACE: str(pace_s or case.pace_s), SPEEDS: json.dumps(speeds),
        WIDTH: str(width if case.layers == 1 else OF_A_BUCKET), LAYERS: str(case.layers), OVERFLOWS: str(overflows),
        TABLES: str(tables),
    }  # fmt: skip
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


def check_losses(run: Run, layers: int = 1) -> None:
    """Check that each step is recorded with the loss of its whole batch: weights of rows that have moved once an epoch
    before it, whose batches all ranks have.
    """
    width = 1 if layers == 1 else layers * OF_A_BUCKET
    steps = STEPS // EPOCHS
    assert run.losses() == pytest.approx({step: -width * ((step - 1) // steps) for step in range(1, STEPS + 1)})


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
        check_losses(run, case.layers)
        deaths = run.events("worker_died")  # more of them where gloo does not notice a broken connection: it ends then
        assert len(deaths) >= len(case.faults) and all("the others go on" in d["message"] for d in deaths)
        assert not run.events("resumed") and run.records("start")[0]["attempt"] == 0


@pytest.mark.slow
@pytest.mark.parametrize("number", [11, 12])  # the first and the second pass of a step
def test_a_step_of_micro_batches_counts_once_whoever_dies_in_it(number: int, tmp_path: Path) -> None:
    with Runs(tmp_path) as runs:
        run = start(runs, Case("in a micro-batch", 3, (("rank1.0", "backward", number),)), "accumulate=2")
        assert run.end() == 0, run.text()[-3000:]
        check_counted(run)
        check_losses(run)
        assert run.events("worker_died") and not run.events("resumed")


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["none", "topk(1.0, momentum=0, values=fp32, warmup_steps=0)"])
def test_a_step_that_overflowed_is_left_out_by_all_whoever_dies_in_it(codec: str, tmp_path: Path) -> None:
    """The gradient of a sample is infinite: of each epoch its batch is left out, and losses are scaled half as much.

    Of the two that may die, the one that has it does, and the others compute that step again.
    """
    dying = Case("where it overflows", 3, (("rank1.0", "overflow", 1), ("rank2.0", "overflow", 1)))
    settings = ("precision=fp16", f"compression={codec}")
    with Runs(tmp_path) as runs:
        run = start(runs, dying, *settings, width=32, overflows=50)
        assert run.end() == 0, run.text()[-3000:]
        check_recorded(run)
        assert run.events("worker_died") and not run.events("resumed")
        state, counts = state_of(run.folder, "newest"), moved(run.folder)
        assert float(state["scaler"]["scale"]) == 2.0 ** (16 - EPOCHS)
        assert torch.equal(counts[50], torch.zeros_like(counts[50]))
        of_all = torch.full_like(counts[0], EPOCHS * (SAMPLES - BATCH))
        torch.testing.assert_close(counts.sum(dim=0), of_all, rtol=1e-6, atol=0)  # what is encoded is rounded


@pytest.mark.parametrize(
    ("sync", "case"),
    [pytest.param(sync, case, marks=case.mark, id=f"{sync} {case.name}") for sync, case in IN_RECOVERY],
)
def test_a_death_in_recovery_starts_another_one(sync: str, case: Case, tmp_path: Path) -> None:
    with Runs(tmp_path) as runs:
        run = start(runs, case, f"sync={sync}")
        assert run.end() == 0, run.text()[-3000:]
        check_counted(run)
        if sync == "allreduce":
            check_losses(run)
        fatal = [fault for fault in case.faults if "waits" not in fault[1]]
        assert len(run.events("worker_died")) >= len(fatal) and not run.events("resumed"), run.text()[-3000:]


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
        assert alone["world_size"] == 1 and alone["t"] - death["t"] < 25.0, run.text()[-3000:]  # a try takes 3 s
        assert later and later[-1]["t"] - alone["t"] < 100.0 and not run.events("resumed"), run.text()[-3000:]


TOPK, POWER = "topk(0.05, warmup_steps=0, finish_steps=0)", "powersgd(2, warmup_steps=0, finish_steps=0)"
CODED = (
    (TOPK, Case("between the halves of a sum", 3, (("rank2.0", "spread", 7),))),
    (TOPK, Case("alone from then on", 2, (("rank1.0", "collect", 9),))),
    (
        "topk(0.05, warmup_steps=0, finish_steps=0)",
        Case("with the sum, as others may be", 3, (("rank0.0", "summed", 8),)),
    ),
    (POWER, Case("after the update", 3, (("rank0.0", "after update", 9),))),
    (f"{POWER};ring", Case("along a path", 3, (("rank1.0", "after update", 9),))),
)


@pytest.mark.parametrize(
    ("codec", "case"), [pytest.param(codec, case, marks=case.mark, id=f"{codec} {case.name}") for codec, case in CODED]
)
def test_survivors_keep_what_their_codecs_have_not_sent(codec: str, case: Case, tmp_path: Path) -> None:
    """What has moved, what waits and what waited in the dead ones' memories is each sample once an epoch."""
    with Runs(tmp_path) as runs:
        codec, _, path = codec.partition(";")
        run = start(runs, case, f"compression={codec}", f"collective={path or 'backend'}", width=32)
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
            # Each rank remembers its own gradients without the means: the dead one's of two epochs, here.
            assert missing.min() > -0.67 and missing.max() < 1.34, text
        assert any("had not sent yet is lost" in event["message"] for event in run.events("members"))


PATHS = (
    ("ring", Case("along a path of ours", 4, (("rank2.0", "sum", 7),))),
    ("halving_doubling", Case("the one that leads", 4, (("rank0.0", "after update", 9),))),
    ("hierarchical(group=2)", Case("two at once", 4, (("rank1.0", "backward", 6), ("rank2.0", "backward", 6)))),
    ("auto", Case("that was chosen at the start", 3, (("rank0.0", "after update", 9),))),
)


@pytest.mark.parametrize("follows", [pytest.param("true", marks=pytest.mark.slow), "false"])
@pytest.mark.long
def test_survivors_go_on_with_the_codecs_that_were_chosen(follows: str, tmp_path: Path) -> None:
    """What an adaptive codec has decided so far is the same on all ranks, those that come included."""
    case = Case("one after the other", 3, (("rank1.0", "backward", 12), ("rank0.0", "after update", 20)))
    with Runs(tmp_path) as runs:
        codec = f"adaptive(error=0.3, follow_link={follows})"
        run = start(runs, case, f"compression={codec}", "eval_every=0", "checkpoint_every=100", pace_s=0.1, width=64)
        assert run.end() == 0, run.text()[-3000:]
        check_recorded(run)
        assert len(run.events("worker_died")) >= 2 and not run.events("resumed")
        weights = moved(run.folder)
        assert weights.max() < EPOCHS + 0.1 and weights.mean() > EPOCHS / 2


@pytest.mark.parametrize(
    ("path", "case"), [pytest.param(path, case, marks=case.mark, id=f"{path} {case.name}") for path, case in PATHS]
)
def test_paths_of_ours_run_between_those_that_are_left(path: str, case: Case, tmp_path: Path) -> None:
    with Runs(tmp_path) as runs:
        run = start(runs, case, f"collective={path}")
        assert run.end() == 0, run.text()[-3000:]
        check_counted(run)
        assert len(run.events("worker_died")) >= len(case.faults) and not run.events("resumed")


def start_drawing(runs: Runs, case: Case, *settings: str, draws: bool, folder: str = "run") -> Run:
    """Start a run of two layers with the faults of a case; `draws`: with BatchNorm and dropout."""
    environment = {FAULTS: json.dumps(case.faults), NOTES: str(runs.root), DRAWS: str(int(draws))}
    environment["PYTHONPATH"] = python_path()
    path = runs.root / folder
    program = (sys.executable, "-m", "tests.ranks.drawing_parts", str(path), str(case.workers), *settings)
    return runs.start(folder=folder, program=program, environment=environment)


@pytest.mark.slow
def test_who_is_alone_begins_a_step_again_as_it_was(tmp_path: Path) -> None:
    """Weights, BatchNorm statistics and the generator of dropout are those that the lost step began with."""
    with Runs(tmp_path) as runs:
        case = Case("in the second micro-batch", 2, (("rank1.0", "backward", 12),))
        run = start_drawing(runs, case, "accumulate=2", "balance=off", draws=True)
        assert run.end() == 0, run.text()[-3000:]
        assert run.events("worker_died") and not run.events("resumed")
        check_recorded(run)
        notes = [{**note, "samples": 0} for note in notes_of(tmp_path, "rank0.0")]
        samples = [note["samples"] for note in notes_of(tmp_path, "rank0.0")]
        again = samples.index(BATCH // 2)
        assert samples[:again].count(BATCH // 4) == 12, "the one that died was in the second pass of the sixth step"
        assert notes[again] == notes[again - 2] != notes[again - 1]


@pytest.mark.slow
def test_a_worker_that_is_back_before_the_next_step_changes_no_bit(tmp_path: Path) -> None:
    """Shares of batches stay as they were, and what the one that comes is given is what it had."""
    settings = ("balance=off", "ema=0.9", "clip_norm=0.5", "seed=1")
    waits = Case("after the update", 2, (("rank1.0", "after update", 5), ("rank0.0", "after update, waits", 5)))
    with Runs(tmp_path) as runs:
        run = start_drawing(runs, waits, *settings, draws=False)
        undisturbed = start_drawing(runs, Case("none", 2, ()), *settings, draws=False, folder="undisturbed")
        assert run.end() == 0 and undisturbed.end() == 0, run.text()[-3000:]
        assert run.events("worker_died") and not run.events("resumed")
        assert [record["world_size"] for record in run.records("start")] == [2, 2], run.text()[-3000:]
        state, expected = (flatten(state_of(each.folder, "newest"))[1] for each in (run, undisturbed))
        shared = [name for name in expected if not name.startswith(RANKS)]
        assert len(shared) >= 8
        for name in shared:
            assert torch.equal(state[name], expected[name]), name
        known = [{step: loss for step, loss in each.losses().items() if step > 5} for each in (run, undisturbed)]
        assert known[0] == known[1]  # of those before, the record has what the one that was left had of them


BALANCED = Case("shares by speed", 3, (("rank0.0", "backward", 21), ("rank1.0", "error in forward", 30)))


@pytest.mark.long
def test_shares_by_speed_go_on_among_those_that_are_left_and_come(tmp_path: Path) -> None:
    """Rank 2 is slow, and rank 0 dies once parts are unequal: the others keep their proportions, then it comes back.

    Later an error ends all of them: they go back to a checkpoint, and its parts.
    """
    slow = {"rank0.0": 0.05, "rank0.1": 0.05, "rank1.0": 0.05, "rank2.0": 0.2}
    with Runs(tmp_path) as runs:
        settings = ("balance=auto", "elastic=auto", "checkpoint_every=16", "eval_every=0")
        run = start(runs, BALANCED, *settings, speeds=slow)
        assert run.end() == 0, run.text()[-3000:]
        assert torch.equal(moved(run.folder), torch.full_like(moved(run.folder), EPOCHS)), run.text()[-3000:]
        died = [event["message"] for event in run.events("worker_died")]
        assert len(died) >= 2 and len(run.events("resumed")) == 1, "\n".join(died)  # gloo: see above
        events = run.events("shares_dealt")
        dealt = [event["sizes"] for event in events]
        assert all(sum(sizes) == BATCH for sizes in dealt), dealt
        assert len(dealt[0]) == 3 and min(dealt[0][:2]) > dealt[0][2], dealt
        of_two = next(sizes for sizes in dealt if len(sizes) == 2)
        assert of_two[0] > of_two[1], dealt
        starts = run.records("start")
        first, *between, resumed = [each["shares"] for each in starts]
        whole = next(shares for shares in between[between.index(of_two) :] if len(shares) == 3)
        assert first == [] and whole in dealt
        before = [e["sizes"] for e in events if e["step"] <= starts[-1]["start_step"] and e["t"] < starts[-1]["t"]]
        assert resumed == before[-1] == dealt[0]
        assert any("as when these steps were trained before" in e["message"] and e["sizes"] == whole for e in events)


NORMED = ("digits", "--model", "normed_parts:normed", "--sync-batchnorm", "--batch-size", "96", "--epochs", "9",
          "--max-steps", "60", "--eval-every", "0", "--lr", "0.05", *SMALL)  # fmt: skip


@pytest.mark.parametrize(
    "workers",
    [pytest.param(3, marks=pytest.mark.long, id="two go on"), pytest.param(2, marks=pytest.mark.slow, id="one")],
)
def test_statistics_of_a_batch_stay_those_of_all_its_samples(workers: int, tmp_path: Path) -> None:
    """A run of one worker has the same ones: so its losses and weights are the same, but for rounding."""
    shutil.copy(Path(__file__).parent / "normed_parts.py", tmp_path)
    with Runs(tmp_path) as runs:
        run = runs.start("train", *NORMED, "--workers", str(workers), "--elastic", "on", folder="run")
        run.wait_for_step(15)
        os.kill(run.pids()[1], signal.SIGKILL)
        assert run.end() == 0, run.text()[-3000:]
        alone = runs.start("train", *NORMED, "--workers", "1", folder="alone")
        assert alone.end() == 0, alone.text()[-3000:]
        assert not run.events("resumed")
        died, *others = [(r["world_size"], r["start_step"]) for r in run.records("start")][1:]
        assert died[0] == workers - 1 and (workers, 60) >= others[-1] >= (workers, died[1])  # who joins may be quick
        losses, expected = run.losses(), alone.losses()
        after = range(died[1] + 1, 61)
        assert len(after) > 20
        assert all(losses[step] == pytest.approx(expected[step], rel=1e-9) for step in after)
        for name, tensor in state_of(alone.folder, "newest")["model"].items():
            torch.testing.assert_close(state_of(run.folder, "newest")["model"][name], tensor, rtol=1e-8, atol=1e-10)


TUNED = ("digits", "--model", "normed_parts:normed", "--tune", "head", "--batch-size", "96", "--epochs", "9",
         "--max-steps", "60", "--eval-every", "0", "--lr", "0.05", "--checkpoint-every", "10", *SMALL)  # fmt: skip


@pytest.mark.long
def test_what_tuning_freezes_stays_whoever_leads(tmp_path: Path) -> None:
    """The one that leads is killed once it has written what is frozen: checkpoints of the next one have it all."""
    shutil.copy(Path(__file__).parent / "normed_parts.py", tmp_path)
    with Runs(tmp_path) as runs:
        run = runs.start("train", *TUNED, "--workers", "2", "--elastic", "on", folder="run")
        run.wait_for(lambda: run.records("checkpoint"), "a checkpoint")
        os.kill(run.pids()[0], signal.SIGKILL)
        assert run.end() == 0, run.text()[-3000:]
        alone = runs.start("train", *TUNED, "--workers", "1", folder="alone")
        assert alone.end() == 0, alone.text()[-3000:]
        assert not run.events("resumed") and [r["world_size"] for r in run.records("start")][:2] == [2, 1]
        state, expected = (state_of(each.folder, "newest")["model"] for each in (run, alone))
        assert state.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(state[name], tensor, rtol=1e-9, atol=1e-12)
            if not name.startswith("layers.3"):
                assert torch.equal(state[name], tensor), f"{name} is frozen"
        resumed = runs.start("resume", run.folder, "--epochs", "9", "--max-steps", "70", folder="run")
        assert resumed.end() == 0, resumed.text()[-3000:]


@pytest.mark.long
def test_one_that_all_others_left_comes_to_the_end(tmp_path: Path) -> None:
    with Runs(tmp_path) as runs:
        words = ("--workers", "2", "--compression", "int8", "--elastic", "on", "--max-restarts", "0", "--epochs", "20")
        run = runs.train("digits", "--model", "mlp", *words, *SMALL, folder="run")
        run.wait_for_step(20)
        os.kill(run.pids()[1], signal.SIGKILL)
        assert run.end() == 0, run.errors()
        assert run.records("end")[-1]["status"] == "completed"
