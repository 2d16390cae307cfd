"""`--profile`: a trace of all ranks over a few steps, as Perfetto reads it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

import echelon
from echelon.observe.profile import PROFILE_FOLDER, TRACE_FILE, WARM_UP
from tests.ranks.runs import SMALL, Runs

PHASES = {"phase: data", "phase: forward", "phase: backward", "phase: update"}


def read_trace(run: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the events with a duration of each process of a trace, by its name; checks the form."""
    trace = json.loads(gzip.decompress((run / PROFILE_FOLDER / TRACE_FILE).read_bytes()))
    assert not list((run / PROFILE_FOLDER).glob("rank*")), "parts were left"
    names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert all({"ts", "dur", "tid"} <= event.keys() for event in spans)
    return {name: [event for event in spans if event["pid"] == pid] for pid, name in names.items()}


def steps_of(events: list[dict[str, Any]]) -> int:
    return sum(event["name"].startswith("step ") for event in events)


@pytest.mark.parametrize(("max_steps", "steps"), [(12, 3), (WARM_UP + 1, 2), (WARM_UP - 1, 0)])
def test_a_run_leaves_a_trace_of_its_steps_after_the_first_ones(tmp_path: Path, max_steps: int, steps: int) -> None:
    outcome = echelon.train(
        "mlp", "digits", tmp_path / "run", max_steps=max_steps, batch_size=32, profile=3, workers=1, threads=1,
        device="cpu", eval_every=0,
    )  # fmt: skip
    assert bool(steps) == any("perfetto" in line for line in outcome.words)
    if steps:
        (events,) = (e for name, e in read_trace(tmp_path / "run").items() if steps_of(e) and name.startswith("rank 0"))
        assert steps_of(events) == steps and {e["name"] for e in events} >= PHASES


@pytest.mark.parametrize(
    "sync", [pytest.param("allreduce", marks=pytest.mark.long), pytest.param("ps(mode=sync)", marks=pytest.mark.slow)]
)
def test_ranks_are_told_apart_in_one_trace(tmp_path: Path, sync: str) -> None:
    with Runs(tmp_path) as runs:
        run = runs.start("train", "digits", "--workers", "2", "--sync", sync, "--max-steps", "24", "--profile", "4",
                         "--batch-size", "64", *SMALL, folder="run")  # fmt: skip
        assert run.end() == 0, run.text()
        assert "profile/trace.json.gz" in run.text()
        traced = {name.split(":")[0] for name, events in read_trace(run.folder).items() if steps_of(events)}
        assert traced == {"rank 0", "rank 1"}
