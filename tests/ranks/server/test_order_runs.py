"""Whole runs with pushes and pulls in the order of the forward pass: the bits of the other order, and what is told."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch

from echelon.records.kinds import Start, WorkerWindow
from echelon.reporting.report.records import load_run
from echelon.run.trained import best_weights
from tests.ranks.run_many import run_many
from tests.ranks.runs import SMALL, Runs, losses_of

PRIORITY = "ps(mode=sync, servers=2, order=priority)"


def same(one: Path, two: Path) -> bool:
    """Whether two runs have the same losses and weights."""
    first, second = best_weights(one), best_weights(two)
    is_same = first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
    return is_same and losses_of(one) == losses_of(two)


@pytest.mark.long
def test_the_bits_are_those_of_the_other_order(tmp_path: Path) -> None:
    """With bf16, micro-batches, a codec, an average, and checkpoints between the epochs' ends."""
    command = ["train", "digits", "--model", "small_cnn", "--workers", "3", "--epochs", "2", "--batch-size", "96",
               "--precision", "bf16", "--accumulate", "2", "--compression", "topk(0.1)", "--checkpoint-every", "7",
               "--ema", "0.9", *SMALL]  # fmt: skip
    syncs = {"ready": "ps(mode=sync, servers=2)", "priority": PRIORITY}
    results = run_many(tmp_path, [[*command, "--sync", sync, "--run", name] for name, sync in syncs.items()])
    assert [r.code for r in results] == [0, 0], results
    assert same(tmp_path / "ready", tmp_path / "priority")
    record = load_run(tmp_path / "priority")
    assert [start.order for start in record.of(Start)] == ["priority"]
    assert "order=priority" in (tmp_path / "priority" / "report.html").read_text()
    assert record.of(WorkerWindow) and not any(w.overlapped_s for w in load_run(tmp_path / "ready").of(WorkerWindow))


@pytest.mark.long
def test_a_run_that_was_stopped_ahead_goes_on_with_its_bits(tmp_path: Path) -> None:
    command = ("--model", "mlp", "--workers", "2", "--epochs", "12", "--batch-size", "32")
    with Runs(tmp_path) as runs:
        stopped = runs.train("digits", *command, "--sync", PRIORITY, folder="stopped")
        stopped.wait_for_step(50)
        stopped.process.send_signal(signal.SIGINT)
        assert stopped.end() == 130, stopped.text()
        assert 50 <= len(stopped.losses()) < 45 * 12
    whole = ["train", "digits", *command, "--sync", "ps(mode=sync, servers=2)", *SMALL, "--run", "whole"]
    results = run_many(tmp_path, [["resume", "stopped"], whole])
    assert [r.code for r in results] == [0, 0], results
    assert same(tmp_path / "stopped", tmp_path / "whole")
