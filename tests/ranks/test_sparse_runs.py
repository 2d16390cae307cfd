"""Sparse tables from the command line: one worker and two learn the same, and a stopped run goes on with its bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.ranks.run_many import run_many
from tests.ranks.runs import SMALL, losses_of, read_lines

pytestmark = pytest.mark.long


def _weights(run: Path) -> dict[str, Tensor]:
    """Return the model of a run's last checkpoint."""
    last = max((run / "checkpoints").glob("step-*"))
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
    train = ["train", *of, *SMALL, *tables, *short]
    commands = [
        [*train, "--workers", "1", "--run", "one"],
        [*train, "--workers", "2", "--run", "two"],
        [*train, "--workers", "2", "--parallel", "dp=2,table=2", "--run", "cut"],
        [*train, *coded, "--run", "whole"],
        [*train, *coded, "--max-steps", "7", "--run", "stopped"],
        ["resume", "stopped", "--max-steps", "0"],
    ]
    results = run_many(tmp_path, commands)
    assert [result.code for result in results] == [0] * 6, results
    for name in ("two", "cut"):
        assert losses_of(tmp_path / name) == pytest.approx(losses_of(tmp_path / "one"), rel=1e-4), name
    expected, resumed = _weights(tmp_path / "whole"), _weights(tmp_path / "stopped")
    assert expected.keys() == resumed.keys() and any("embedding" in name for name in expected)
    assert all(torch.equal(expected[name], resumed[name]) for name in expected)
    lines = [read_lines(tmp_path / name) for name in ("two", "whole")]
    sent = [sum(line["wire_bytes"] for line in each if line["kind"] == "steps") for each in lines]
    assert 0 < sent[1] < sent[0]
