"""Parts of batches that workers take without waiting: a run goes on with more workers than it began with."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.ranks.runs import SMALL, Runs

EPOCHS, STEPS = 40, 12


@pytest.mark.long
def test_a_run_stopped_between_two_parts_goes_on_with_more_workers(tmp_path: Path) -> None:
    """Every step is counted once, and it learns what a synchronous run does."""
    with Runs(tmp_path) as runs:
        begun = runs.start("train", "digits", "--model", "mlp", "--workers", "2", "--epochs", str(EPOCHS), *SMALL,
                           "--sync", "ps(mode=async)", folder="run")  # fmt: skip
        begun.wait_for_step(2 * STEPS)
        begun.process.send_signal(signal.SIGTERM)
        begun.check_stopped(signal.SIGTERM)
        again = runs.start("resume", str(begun.folder), "--workers", "3", folder="run")
        assert again.end() == 0, again.text()
        assert sorted(begun.losses()) == list(range(1, EPOCHS * STEPS + 1))
        assert begun.summary()["metrics"]["top1"] > 0.93
