"""Where memory is short, what a worker alone has is not kept twice, and the user is told."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.ranks.run_many import python_path
from tests.ranks.runs import SMALL, Runs


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("layout", ["fsdp=2", "dp=2,zero1"])
def test_without_room_for_a_copy_the_newest_checkpoint_counts(layout: str, tmp_path: Path) -> None:
    with Runs(tmp_path) as runs:
        run = runs.start(
            "train", "digits", "--model", "tests.ranks.crowded_parts:crowded", "--workers", "2", "--parallel", layout,
            *SMALL, "--epochs", "100000", "--checkpoint-every", "10", "--balance", "off", folder="run",
            environment={"PYTHONPATH": python_path(), "ECHELON_RUN_SECRET": "5a" * 32},
        )  # fmt: skip
        run.wait_for(lambda: run.records("checkpoint"), "a checkpoint")
        os.kill(run.pids()[1], signal.SIGKILL)
        run.wait_for(lambda: run.events("resumed"), "a restart")
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.end() == 128 + signal.SIGTERM, run.text()[-2000:]
        told = {event["message"] for event in run.events("copies")}
        assert any("is not kept twice, and its death loses steps: it would take up to" in each for each in told), told
        assert not [saved for saved in run.records("checkpoint") if saved["reason"] == "rescue"]
