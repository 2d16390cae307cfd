"""Implicit feedback from the command line: the same ranking on one worker and on two, and after a stop."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.ranks.run_many import run_many
from tests.ranks.runs import SMALL, losses_of, read_lines

pytestmark = pytest.mark.long


def test_what_users_took_is_ranked_the_same_on_two_workers_and_after_a_resume(tmp_path: Path) -> None:
    rows = [f"{user},{(7 * user * user + 3 * i) % 40},{i}" for user in range(40) for i in range(8)]
    (tmp_path / "taken.csv").write_text("\n".join(["user,item,time", *rows]))
    trained = (tmp_path / "taken.csv", "--task", "recommendation", "--input", "user,item", "--negatives", "8")
    short = ("--batch-size", "50", "--checkpoint-every", "1")
    train = ["train", *trained, *SMALL, *short, "--epochs", "4"]
    commands = [
        [*train, "--workers", "1", "--run", "one"],
        [*train, "--workers", "2", "--max-steps", "7", "--run", "two"],
        ["resume", "two", "--max-steps", "0", "--workers", "2"],
    ]
    results = run_many(tmp_path, commands)
    assert [result.code for result in results] == [0] * 3, results
    one, two = (tmp_path / name for name in ("one", "two"))
    assert losses_of(two) == pytest.approx(losses_of(one), rel=1e-4)
    alone, resumed = ([r for r in read_lines(run) if r["kind"] == "evaluation"][-1] for run in (one, two))
    assert resumed["metrics"] == pytest.approx(alone["metrics"], rel=1e-4) and resumed["samples"] == 40
    assert alone["metrics"]["hit_rate10"] > 0 and alone["test_samples"] == 40
    sections = json.loads((one / "evaluation.json").read_text())["sections"]
    assert "Ranking" in [section["title"] for section in sections]
