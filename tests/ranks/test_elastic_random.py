"""Random members of random groups are killed at random points: each sample of each epoch still counts once."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from tests.ranks.counting_parts import EPOCHS, STEPS, moved
from tests.ranks.runs import Runs
from tests.ranks.test_elastic import Case, check_recorded, start

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

DRAWS = 12
POINTS = ("forward", "backward", "sum", "before update", "after update")
SYNCS = ("allreduce", "local(4)", "diloco(4, outer_lr=1, outer_momentum=0)")


def drawn(seed: int) -> tuple[str, Case]:
    """Return a strategy, and random members that die at random points: at least one of the first stays."""
    draws = random.Random(seed)
    workers = draws.randrange(2, 5)
    dead = draws.sample(range(workers), draws.randrange(1, workers))
    faults = tuple((f"rank{rank}.0", draws.choice(POINTS), draws.randrange(2, STEPS)) for rank in dead)
    return draws.choice(SYNCS), Case(f"draw {seed}", workers, faults)


@pytest.mark.parametrize("seed", range(DRAWS))
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
