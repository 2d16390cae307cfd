"""Elasticity sends nothing until somebody dies, and then what who joins lacks, which the record counts by itself."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from echelon.collectives.wire import ring_bytes
from tests.ranks.run_many import run_many
from tests.ranks.runs import SMALL, Record, Runs, read_lines

STEPS = 20
BOTH = 2  # workers, of which each sends what it adds
STATISTICS_BYTES = 20_000  # at most, in so few steps: how many looks and windows there are follows the clock
POWERSGD = "powersgd(2, warmup_steps=0, finish_steps=0)"
CODECS = {"none": 0, "topk(0.05, warmup_steps=0, finish_steps=0)": 0, POWERSGD: ring_bytes(4, BOTH, on_gpu=False)}
"""More bytes of each worker a step: a linear codec knows what it left out once a number more (4 bytes, in messages of
gloo) has confirmed the sum."""
TRAIN = ("train", "digits", "--model", "mlp", "--workers", "2", "--eval-every", "0", "--checkpoint-every", "1000000")


def windows(folder: Path) -> list[Record]:
    """Return the windows of steps that a run recorded."""
    return [record for record in read_lines(folder) if record["kind"] == "steps"]


@pytest.mark.long
def test_without_a_death_nothing_more_is_sent(tmp_path: Path) -> None:
    names = [(codec, elastic) for codec in CODECS for elastic in ("on", "off")]
    folders = {name: f"{i}" for i, name in enumerate(names)}
    commands = [
        [*TRAIN, *SMALL, "--epochs", "9", "--max-steps", str(STEPS), "--compression", codec, "--elastic", elastic,
         "--run", folders[codec, elastic]]
        for codec, elastic in names
    ]  # fmt: skip
    results = run_many(tmp_path, commands)
    assert all(result.code == 0 for result in results), results
    for codec, more in CODECS.items():
        on, off = (tmp_path / folders[codec, elastic] for elastic in ("on", "off"))
        agreed_on, agreed_off = (sum(window["wire_bytes"] for window in windows(folder)) for folder in (on, off))
        assert agreed_on - agreed_off == BOTH * more * STEPS, codec
        others = [sum(window["other_wire_bytes"] for window in windows(folder)) for folder in (on, off)]
        assert max(others) < STATISTICS_BYTES, codec
        starts = [r for r in read_lines(on) if r["kind"] == "start"]
        assert [start["recovery_bytes"] for start in starts] == [0]


@pytest.mark.long
def test_who_joins_is_sent_the_state_and_the_record_says_how_much(tmp_path: Path) -> None:
    with Runs(tmp_path) as runs:
        run = runs.start(
            *TRAIN, *SMALL, "--epochs", "100000", "--optimizer", "momentum", "--elastic", "on", folder="run"
        )
        run.wait_for_step(5)
        os.kill(run.pids()[1], signal.SIGKILL)
        joined = run.wait_for(lambda: run.records("start")[2:], "the dead worker's return")[0]
        run.wait_for_step(joined["start_step"] + 1, after_t=joined["t"])
        os.kill(run.process.pid, signal.SIGTERM)
        assert run.end() == 128 + signal.SIGTERM, run.text()[-2000:]
        first, alone, *_ = run.records("start")
    state = 2 * 4 * first["parameters"]  # and as many momenta
    assert first["recovery_bytes"] == alone["recovery_bytes"] == 0
    assert state <= joined["recovery_bytes"] < 1.05 * state + 10_000
    assert sum(window["other_wire_bytes"] for window in windows(run.folder)) >= joined["recovery_bytes"]
