"""Random members of random groups are killed at random points: each sample of each epoch still counts once."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.ranks.counting_parts import EPOCHS, STEPS, moved
from tests.ranks.runs import Runs
from tests.ranks.test_elastic import Case, check_recorded, start

pytestmark = pytest.mark.timeout(600)

SEEDS = range(26, 38)  # their draws reach all that is asked of them below
PERIOD = 4
POINTS = ("forward", "backward", "sum", "before update", "after update")
OF_AVERAGES = ("average", "average, in it", "averaged")
SYNCS = ("allreduce", f"local({PERIOD})", f"diloco({PERIOD}, outer_lr=1, outer_momentum=0)")


def drawn(seed: int) -> tuple[str, Case]:
    """Return a strategy, and random members that die at random points: at least one of the first stays."""
    draws = random.Random(seed)
    workers = draws.randrange(2, 5)
    dead = draws.sample(range(workers), draws.randrange(1, workers))
    sync = draws.choice(SYNCS)
    faults = tuple((f"rank{rank}.0", *_point(draws, averages=sync != "allreduce")) for rank in dead)
    return sync, Case(f"draw {seed}", workers, faults)


def _point(draws: random.Random, averages: bool) -> tuple[str, int]:
    """Return a point and how often a member has come there; after an update, of one that is averaged."""
    point = draws.choice(POINTS + OF_AVERAGES * averages)
    if point in OF_AVERAGES:
        return point, draws.randrange(1, STEPS // PERIOD)
    if averages and point == "after update":
        return point, draws.randrange(PERIOD, STEPS, PERIOD)
    return point, draws.randrange(2, STEPS)


def test_draws_reach_agreements() -> None:
    """Some member dies after an update and before replicas agree on it, one as they do, and one right after."""
    points = {fault[1] for sync, case in map(drawn, SEEDS) if sync != "allreduce" for fault in case.faults}
    assert points >= {"after update", *OF_AVERAGES}


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_random_deaths_lose_no_sample(seed: int, tmp_path: Path) -> None:
    """Random members of random groups die at random points."""
    sync, case = drawn(seed)
    with Runs(tmp_path) as runs:
        balance = "auto" if seed % 2 else "off"
        run = start(runs, case, f"sync={sync}", f"balance={balance}", "max_restarts=20")
        assert run.end() == 0, run.text()[-3000:]
        assert not run.events("resumed"), run.text()[-3000:]
        check_recorded(run)
        weights = moved(run.folder)
        assert torch.allclose(weights, torch.full_like(weights, EPOCHS), atol=1e-9), run.text()[-3000:]
