"""Shares by measured speed, with a rank whose samples take four times as long."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.runs import SMALL, Run, Runs

STEPS = 60
SETTINGS = ("--model", "slow_parts:slow_rank", "--workers", "2", "--batch-size", "128", "--eval-every", "0",
            "--max-steps", str(STEPS), "--epochs", "9", "--checkpoint-every", "100000", *SMALL)  # fmt: skip


def losses_by_start(run: Run) -> list[dict[int, float]]:
    """Return the loss of each step, for one start after the other."""
    starts: list[dict[int, float]] = []
    for record in run.records():
        if record["kind"] == "start":
            starts.append({})
        elif record["kind"] == "steps":
            first = record["step"] - len(record["losses"]) + 1
            starts[-1] |= {first + i: loss for i, loss in enumerate(record["losses"])}
    return starts


def dealt(run: Run) -> list[tuple[int, list[int]]]:
    """Return the shares that were dealt, each with its step."""
    return [(event["step"], event["sizes"]) for event in run.events("shares_dealt")]


@pytest.mark.slow
def test_a_slow_rank_gets_less_and_does_so_again_when_steps_are_trained_again(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).parent / "slow_parts.py", tmp_path)
    with Runs(tmp_path) as runs:
        run = runs.start("train", "digits", *SETTINGS, "--balance", "auto", "--elastic", "off", folder="auto")

        def first() -> Any:
            return dealt(run)

        ((step, sizes),) = run.wait_for(first, "shares by speed")
        assert sum(sizes) == 128 and sizes[1] < 50, sizes
        run.wait_for_step(step + 4)
        os.kill(run.pids()[1], signal.SIGKILL)
        assert run.end() == 0, run.text()
        before, after = losses_by_start(run)
        assert max(before) > step and after.keys() == set(range(1, STEPS + 1))
        assert before.items() <= after.items(), "the same bits, with the same shares at the same steps"
        assert dealt(run).count((step, sizes)) == 2
        assert not run.left_behind()
        even = runs.start("train", "digits", *SETTINGS, folder="off")
        assert even.end() == 0, even.text()
        assert not dealt(even)
        (equal,) = losses_by_start(even)
        assert all(after[i] == pytest.approx(equal[i], rel=1e-4) for i in equal), "the curve stays what it was"


@pytest.mark.parametrize(
    ("options", "said"),
    [
        pytest.param(("--workers", "1"), "one worker has all of each batch", marks=pytest.mark.slow),
        pytest.param(("--workers", "2", "--sync", "ps(mode=async)"), "whenever they are done", marks=pytest.mark.slow),
        pytest.param(("--workers", "2", "--parallel", "fsdp=2"), "there is one replica", marks=pytest.mark.long),
    ],
)
def test_where_it_does_nothing_it_says_why(tmp_path: Path, options: tuple[str, ...], said: str) -> None:
    with Runs(tmp_path) as runs:
        run = runs.start("train", "digits", "--max-steps", "2", "--balance", "auto", *options, *SMALL, folder="run")
        assert run.end() == 0, run.text()
        (note,) = [event["message"] for event in run.events("settings") if "--balance" in event["message"]]
        assert note.startswith("--balance auto does nothing: ") and said in note
