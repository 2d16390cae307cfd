"""Implicit feedback from the command line: the same ranking on one worker and on two, and after a stop."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.ranks.runs import Runs

pytestmark = pytest.mark.long


def test_what_users_took_is_ranked_the_same_on_two_workers_and_after_a_resume(tmp_path: Path) -> None:
    rows = [f"{user},{(7 * user * user + 3 * i) % 40},{i}" for user in range(40) for i in range(8)]
    (tmp_path / "taken.csv").write_text("\n".join(["user,item,time", *rows]))
    trained = (tmp_path / "taken.csv", "--task", "recommendation", "--input", "user,item", "--negatives", "8")
    short = ("--batch-size", "50", "--checkpoint-every", "1")
    with Runs(tmp_path) as runs:
        one = runs.train(*trained, *short, "--epochs", "4", "--workers", "1", folder="one")
        two = runs.train(*trained, *short, "--epochs", "4", "--max-steps", "7", "--workers", "2", folder="two")
        assert (one.end(), two.end()) == (0, 0), one.text() + two.text()
        again = runs.start("resume", two.folder, "--max-steps", "0", "--workers", "2")
        assert again.end() == 0, again.text()
    assert two.losses() == pytest.approx(one.losses(), rel=1e-4)
    alone, resumed = (run.records("evaluation")[-1] for run in (one, two))
    assert resumed["metrics"] == pytest.approx(alone["metrics"], rel=1e-4) and resumed["samples"] == 40
    assert alone["metrics"]["hit_rate10"] > 0 and alone["test_samples"] == 40
    sections = json.loads((one.folder / "evaluation.json").read_text())["sections"]
    assert "Ranking" in [section["title"] for section in sections]
