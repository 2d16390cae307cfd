"""Sparse tables from the command line: one worker and two learn the same, and a stopped run goes on with its bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from echelon.checkpoint import CheckpointStore, whole
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


def _train(folder: Path) -> list[str]:
    """Return a command that trains on ratings, which are written to a folder, but for its workers and its name."""
    rows = [f"{user},{(7 * user * user + 3 * i) % 90},{(user + i) % 5 + 1}.5" for user in range(60) for i in range(8)]
    (folder / "ratings.csv").write_text("\n".join(["user,item,rating", *rows]))
    of = (folder / "ratings.csv", "--task", "recommendation", "--input", "user,item", "--target", "rating")
    tables = ("--model", "two_tower", "--sparse-tables", "--optimizer", "sparse_adam", "--lr", "0.01")
    return ["train", *map(str, of), *SMALL, *tables, "--weight-decay", "0", "--batch-size", "50", "--epochs", "2"]


def test_two_workers_learn_what_one_does_and_a_stopped_run_has_the_bits_of_a_whole_one(tmp_path: Path) -> None:
    coded = ("--workers", "2", "--compression", "int8")
    train = [*_train(tmp_path), "--clip-norm", "1"]
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


def test_servers_make_the_rows_of_one_process_and_a_stopped_run_has_the_bits_of_a_whole_one(tmp_path: Path) -> None:
    train, served = [*_train(tmp_path), "--workers", "1"], ["--sync", "ps(mode=async,servers=2)"]
    commands = [*_runs(train, train, served), ["evaluate", "served", "--json"], ["evaluate", "one", "--json"]]
    results = run_many(tmp_path, commands)
    assert [result.code for result in results] == [0] * 6, results
    assert losses_of(tmp_path / "served") == pytest.approx(losses_of(tmp_path / "one"), rel=1e-5)
    assert losses_of(tmp_path / "stopped") == losses_of(tmp_path / "served")
    one, served_state, stopped = (_state(tmp_path / name) for name in ("one", "served", "stopped"))
    for name, tensor in one.items():
        torch.testing.assert_close(served_state[name], tensor, atol=1e-6, rtol=1e-5)
        assert torch.equal(served_state[name], stopped[name])
    losses = [json.loads(result.out.splitlines()[-1])["loss"] for result in results[-2:]]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_servers_sum_the_rows_of_all_workers_to_what_one_process_does(tmp_path: Path) -> None:
    train, summed = _train(tmp_path), ["--workers", "2", "--sync", "ps(mode=sync,servers=2)"]
    results = run_many(tmp_path, _runs([*train, "--workers", "1"], train, summed))
    assert [result.code for result in results] == [0] * 4, results
    assert losses_of(tmp_path / "served") == pytest.approx(losses_of(tmp_path / "one"), rel=1e-4)
    assert losses_of(tmp_path / "stopped") == losses_of(tmp_path / "served")
    one, expected, resumed = (_state(tmp_path / name) for name in ("one", "served", "stopped"))
    for name, tensor in one.items():
        torch.testing.assert_close(expected[name], tensor, atol=1e-5, rtol=1e-4)
        assert torch.equal(expected[name], resumed[name]), name


def _runs(alone: list[str], train: list[str], servers: list[str]) -> list[list[str]]:
    """Return commands that train alone, on servers, and on servers with a stop on the way."""
    return [
        [*alone, "--run", "one"],
        [*train, *servers, "--run", "served"],
        [*train, *servers, "--max-steps", "7", "--run", "stopped"],
        ["resume", "stopped", "--max-steps", "0"],
    ]


def _state(run: Path) -> dict[str, Tensor]:
    """Return the model of a run's newest checkpoint, in which tensors may lie in parts."""
    found = CheckpointStore(run / "checkpoints", 1).newest()
    assert found is not None
    model: dict[str, Tensor] = whole(found[1]["model"])
    return model
