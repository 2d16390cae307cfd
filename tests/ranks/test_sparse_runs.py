"""Sparse tables from the command line: one worker and two learn the same, and a stopped run goes on with its bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.ranks.runs import Run, Runs

pytestmark = pytest.mark.long


def _weights(run: Run) -> dict[str, Tensor]:
    """Return the model of the last checkpoint."""
    last = max((run.folder / "checkpoints").glob("step-*"))
    found: dict[str, Tensor] = {}
    for file in last.glob("model-*.safetensors"):
        found |= load_file(file)
    return found


def test_two_workers_learn_what_one_does_and_a_stopped_run_has_the_bits_of_a_whole_one(tmp_path: Path) -> None:
    rows = [f"{user},{(7 * user * user + 3 * i) % 90},{(user + i) % 5 + 1}.5" for user in range(60) for i in range(8)]
    (tmp_path / "ratings.csv").write_text("\n".join(["user,item,rating", *rows]))
    of = (tmp_path / "ratings.csv", "--task", "recommendation", "--input", "user,item", "--target", "rating")
    tables = ("--model", "two_tower", "--sparse-tables", "--optimizer", "sparse_adam", "--lr", "0.01")
    short = ("--weight-decay", "0", "--batch-size", "50", "--epochs", "2", "--clip-norm", "1")
    coded = ("--workers", "2", "--compression", "int8")
    with Runs(tmp_path) as runs:
        one = runs.train(*of, *tables, *short, "--workers", "1", folder="one")
        two = runs.train(*of, *tables, *short, "--workers", "2", folder="two")
        cut = runs.train(*of, *tables, *short, "--workers", "2", "--parallel", "dp=2,table=2", folder="cut")
        whole = runs.train(*of, *tables, *short, *coded, folder="whole")
        stopped = runs.train(*of, *tables, *short, *coded, "--max-steps", "7", folder="stopped")
        for run in (one, two, cut, whole, stopped):
            assert run.end() == 0, run.text()
        again = runs.start("resume", stopped.folder, "--max-steps", "0")
        assert again.end() == 0, again.text()
    assert two.losses() == pytest.approx(one.losses(), rel=1e-4)
    assert cut.losses() == pytest.approx(one.losses(), rel=1e-4)
    expected, resumed = _weights(whole), _weights(stopped)
    assert expected.keys() == resumed.keys() and any("embedding" in name for name in expected)
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)
    sent = [sum(window["wire_bytes"] for window in run.records("steps")) for run in (two, whole)]
    assert 0 < sent[1] < sent[0]
