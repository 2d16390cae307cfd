"""A process that hangs while it runs is ended, where the others can go on: they need not wait until they give up."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.ranks.counting_parts import PACE
from tests.ranks.endless_parts import HANGS
from tests.ranks.run_many import python_path
from tests.ranks.runs import Run, Runs
from tests.ranks.test_elastic import check_counted

pytestmark = [pytest.mark.timeout(600), pytest.mark.long]


def start(runs: Runs, workers: int, how: str, *settings: str) -> Run:
    environment = {
        HANGS: json.dumps(["rank1.0", 12, how]), "ECHELON_TEST_FAULTS": "[]", PACE: "0.05", "PYTHONPATH": python_path(),
    }  # fmt: skip
    program = (sys.executable, "-m", "tests.ranks.endless_parts", str(runs.root / "run"), str(workers), *settings)
    return runs.start(folder="run", program=program, environment=environment)


@pytest.mark.parametrize(("how", "workers", "timeout_s", "within_s"), [("loop", 3, 60, 58.0), ("lock", 2, 600, 300.0)])
def test_who_never_returns_from_forward_is_ended_and_the_others_go_on(
    how: str, workers: int, timeout_s: int, within_s: float, tmp_path: Path
) -> None:
    """Rank 1 lives, and would make the others wait for --timeout, and then end."""
    with Runs(tmp_path) as runs:
        run = start(runs, workers, how, f"timeout={timeout_s}s")
        assert run.end() == 0, run.text()[-3000:]
        check_counted(run)
        death, *more = run.events("worker_died")
        hang = next(each for each in run.events("hang") if "rank 1 (pid" in each["message"])
        before = max(r["t"] for r in run.records("steps") if r["t"] < death["t"])
        assert death["rank"] == 1 and "in forward (model code)" in death["message"] and not more
        assert "endless_parts.py" in death["message"] and "the others go on" in death["message"]
        assert "wait" in hang["message"]
        assert death["t"] - before < within_s, death  # half of it, or 20 s; longer on a busy machine
