"""Replicas that train by themselves, when some die: a round is trained again, and an average counts for all or none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from echelon.checkpoint import RANKS
from echelon.trainer.saving import state_of
from tests.ranks.counting_parts import BATCH, EPOCHS, moved, remembered
from tests.ranks.runs import Runs
from tests.ranks.test_elastic import POWER, TOPK, Case, check_recorded, start

pytestmark = pytest.mark.timeout(600)

OUTER = "diloco(4, outer_lr=1, outer_momentum=0)"
ROUNDS = (
    ("local(4)", Case("in the midst of a round", 3, (("rank1.0", "backward", 7),))),
    (OUTER, Case("the one that leads between averages", 3, (("rank0.0", "forward", 12),))),
    ("easgd(4)", Case("alone from then on", 2, (("rank1.0", "after update", 10),))),
    ("local(4)", Case("before an average", 3, (("rank1.0", "average", 9),))),
    ("local(4)", Case("in the sum of an average", 3, (("rank2.0", "average, in it", 9),))),
    ("local(4)", Case("the one that leads, with the mean", 3, (("rank0.0", "averaged", 9),))),
    ("local(4, overlap=2)", Case("before an average", 3, (("rank1.0", "average", 9),))),
    ("local(4, overlap=2)", Case("in an average", 3, (("rank2.0", "average, in it", 9),))),
    ("local(4, overlap=2)", Case("the one that leads, with the mean", 3, (("rank0.0", "averaged", 9),))),
    (OUTER, Case("before an average", 3, (("rank0.0", "average", 9),))),
    (OUTER, Case("in an average", 3, (("rank1.0", "average, in it", 9),))),
    (OUTER, Case("with the mean", 2, (("rank1.0", "averaged", 9),))),
    ("easgd(4)", Case("before an average", 2, (("rank1.0", "average", 4),))),
    ("easgd(4)", Case("in an average", 3, (("rank2.0", "average, in it", 4),))),
    ("easgd(4)", Case("the one that leads, with the mean", 3, (("rank0.0", "averaged", 4),))),
    ("local(4)", Case("in the last average", 3, (("rank1.0", "average, in it", 14),))),
    ("local(4, overlap=2)", Case("while a mean travels", 3, (("rank1.0", "backward", 10),))),
    ("local(4, overlap=2)", Case("the one that leads once it has landed", 3, (("rank0.0", "forward", 12),))),
    ("local(4, overlap=2)", Case("after an evaluation", 3, (("rank1.0", "backward", 20),))),
    ("local(4, overlap=2)", Case("the one that leads after an evaluation", 3, (("rank0.0", "after update", 20),))),
    ("local(4, overlap=1)", Case("alone while means land", 2, (("rank1.0", "after update", 14),))),
    ("local(4, overlap=3, warmup=0)", Case("in the first round", 3, (("rank2.0", "backward", 3),))),
    ("local(4, overlap=2)", Case("before the first mean has landed", 3, (("rank2.0", "forward", 2),))),
    ("local(4, start=12)", Case("in a synchronous step before the rounds", 3, (("rank1.0", "backward", 6),))),
    ("local(4, start=12)", Case("after the last synchronous update", 3, (("rank0.0", "after update", 12),))),
    ("local(4, start=12, overlap=2)", Case("in the first round after them", 3, (("rank0.0", "backward", 14),))),
    ("diloco(4, outer_lr=1, outer_momentum=0, overlap=2, alpha=0)",
     Case("a travelling outer step", 3, (("rank1.0", "backward", 10),))),
)  # fmt: skip


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
        epochs = [each["epoch"] for each in run.records("evaluation")]
        assert epochs[:EPOCHS] == list(range(EPOCHS)), run.text()[-3000:]
        assert set(epochs[EPOCHS:]) <= {EPOCHS - 1}, "the last one is made again for who comes after it"
        if sync.startswith("diloco") and "overlap" in sync:  # what is trained while a mean travels is not kept
            assert moved(run.folder).sum() > 0 and moved(run.folder).max() <= EPOCHS + 1e-9
        elif not sync.startswith("easgd"):
            weights = moved(run.folder)
            assert torch.allclose(weights, torch.full_like(weights, EPOCHS), atol=1e-9), run.text()[-3000:]
        else:
            assert moved(run.folder).min() > 0 and moved(run.folder).max() <= EPOCHS + 1e-9


OF_TABLES = (
    ("local(4)", "none", Case("before its rows travel", 3, (("rank1.0", "rows", 9),))),
    ("local(4)", "none", Case("the one that leads, with the sum of rows", 3, (("rank0.0", "summed rows", 9),))),
    ("local(4, overlap=2)", "none", Case("before its rows travel", 3, (("rank2.0", "rows", 9),))),
    ("local(4, overlap=2)", "none", Case("while rows travel", 3, (("rank1.0", "backward", 10),))),
    (OUTER, "bf16", Case("alone, with the sum of rows", 2, (("rank1.0", "summed rows", 9),))),
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sync", "codec", "case"), [pytest.param(*each, id=f"{each[0]} {each[2].name}") for each in OF_TABLES]
)
def test_rows_of_a_round_that_lost_a_replica_are_trained_again(
    sync: str, codec: str, case: Case, tmp_path: Path
) -> None:
    with Runs(tmp_path) as runs:
        run = start(runs, case, f"sync={sync}", f"compression={codec}", tables=1)
        assert run.end() == 0, run.text()[-3000:]
        assert not run.events("resumed") and len(run.events("worker_died")) >= 1
        check_recorded(run)
        weights = moved(run.folder)
        assert weights.shape[1] == 2
        within = 1e-9 if codec == "none" else 0.05  # of bf16's seven bits nothing stays behind
        assert torch.allclose(weights, torch.full_like(weights, EPOCHS), atol=within), run.text()[-3000:]


IN_FIRST_ROUND = (
    ("local(4, warmup=0)", TOPK, ("rank1.0", "backward", 2)),
    ("local(4, overlap=1, warmup=0)", TOPK, ("rank1.0", "backward", 2)),
    ("local(4, warmup=0)", POWER, ("rank1.0", "backward", 2)),
    ("local(4, warmup=0)", TOPK, ("rank1.0", "average", 1)),
    ("local(4, warmup=0)", TOPK, ("rank1.0", "average, in it", 1)),
    ("local(4, warmup=0)", TOPK, ("rank2.0", "collect", 1)),
    ("local(4, warmup=0)", TOPK, ("rank2.0", "spread", 1)),
    ("local(4, warmup=0)", TOPK, ("rank0.0", "averaged", 1)),
    ("local(4, warmup=0)", POWER, ("rank0.0", "average, in it", 1)),
)


@pytest.mark.parametrize(
    ("sync", "codec", "fault"),
    [
        pytest.param(
            *case, marks=pytest.mark.long if i < 2 else pytest.mark.slow, id=f"{case[0]} {case[1]} {case[2][1]}"
        )
        for i, case in enumerate(IN_FIRST_ROUND)
    ],
)
def test_codecs_of_averages_keep_what_they_have_not_sent(
    sync: str, codec: str, fault: tuple[str, str, int], tmp_path: Path
) -> None:
    """Who dies in the first round has nothing in memory, but what the first mean has left there, if the others have it:
    else what has moved and what waits is each sample once an epoch.
    """
    with Runs(tmp_path) as runs:
        case = Case("in the first round", 3, (fault,))
        run = start(runs, case, f"sync={sync}", f"compression={codec}", pace_s=0.15, width=32)
        assert run.end() == 0, run.text()[-3000:]
        check_recorded(run)
        assert run.events("worker_died") and not run.events("resumed")  # two where gloo does not notice, as above
        assert [record["world_size"] for record in run.records("start")][:2] == [3, 2]
        ranks = state_of(run.folder, "newest")[RANKS].values()
        waits = -remembered([each["sync"]["fragments"][0]["codec"] for each in ranks], 32) / BATCH
        assert waits.abs().max() > 0.1 or codec.startswith("powersgd"), "something waits"
        missing = EPOCHS - moved(run.folder) - waits
        left = [-remembered([torch.load(path)], 32) / BATCH for path in tmp_path.glob("*.mean")]
        assert len(left) == (fault[1] == "averaged")
        errors = [float((missing - lost).abs().max()) for lost in (torch.zeros_like(missing), *left)]
        assert min(errors) < 1e-5, (errors, run.text()[-3000:])
