"""Micro-batches that become smaller when memory is short."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import echelon
from echelon.config import load_run_config
from tests.ranks.own_parts import Dots, Greedy, Net
from tests.ranks.runs import SMALL, Runs


@pytest.mark.long
def test_a_run_in_this_process_goes_on_with_half_the_samples_at_a_time(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, data = Greedy(Net()), (Dots(512, 0), Dots(64, 1))
    settings = {"batch_size": 32, "workers": 1, "threads": 1, "checkpoint_every": "4", "accumulate": "auto"}
    outcome = echelon.train(model, data, tmp_path / "run", epochs=2, on_oom="halve", device="cpu", **settings)  # type: ignore[arg-type]
    assert outcome.status == "completed" and model.batches == 0
    assert load_run_config(tmp_path / "run" / "config.yaml").training.accumulate == 4
    told = capsys.readouterr().err
    assert told.count("on-oom halve") == 2 and "4 micro-batches of 8 samples a worker" in told
    assert "the batch stays 32" in told


@pytest.mark.slow
def test_ranks_go_on_from_the_newest_checkpoint_and_no_restart_is_used_up(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).parent / "own_parts.py", tmp_path)
    with Runs(tmp_path) as runs:
        settings = ("--workers", "2", "--batch-size", "32", "--checkpoint-every", "4", "--max-steps", "30", *SMALL)
        run = runs.start("train", "digits", "--model", "own_parts:greedy", *settings, "--max-restarts", "0",
                         "--accumulate", "auto", "--on-oom", "halve", folder="run")  # fmt: skip
        assert run.end() == 0, run.text()
        assert [event["micro_batches"] for event in run.events("more_micro_batches")] == [2]
        assert run.text().count("2 micro-batches of 8 samples a worker from now on, not 1") == 1
        first, again = (start["start_step"] for start in run.records("start"))
        assert first == 0 and again in (0, 4, 8), "from the newest checkpoint that was whole by then"
        assert load_run_config(run.folder / "config.yaml").training.accumulate == 2
        assert not run.left_behind()
