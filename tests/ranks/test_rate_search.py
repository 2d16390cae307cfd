"""`--lr-find`: nothing is trained, evaluated or kept but a curve and what it suggests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.ranks.runs import SMALL, Runs


@pytest.mark.long
def test_a_search_says_which_learning_rates_to_use_and_is_no_run_to_resume(tmp_path: Path) -> None:
    with Runs(tmp_path) as runs:
        settings = ("--model", "mlp", "--workers", "2", "--sync", "ps(mode=async)", *SMALL)
        run = runs.start("train", "digits", *settings, "--lr-find", folder="run")
        assert run.end() == 0, run.text()
        assert "is where the loss fell most steeply" in run.text() and "completed; report" in run.text()
        (end,) = run.records("end")
        assert (end["status"], end["reason"]) == ("completed", "lr_find") and "--lr " in end["message"]
        assert not run.records("evaluation") and not (run.folder / "checkpoints").exists()
        assert "Loss by learning rate" in (run.folder / "report.html").read_text()
        assert not run.left_behind()
        again = runs.start("resume", "run")
        assert again.end() == 2 and "is a search of the learning rate" in again.errors(), again.text()
