"""A run's folder as it looks while the run goes: a made-up record with what each rank uses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from echelon.records.kinds import RESOURCE_NAMES, Resources
from tests.unit.reporting.report.fixtures import LiveState, make_run

USED = [38.5, 6.1e8, 0.0, 0.0, 0.0, 2.5e6, float("nan"), float("nan"), float("nan")]


def make_live_run(folder: Path, story: LiveState | None = None) -> Path:
    """Write a run's folder with a sample of resources after every fifth window; returns it."""
    make_run(folder, story or LiveState(epochs=4))
    lines: list[str] = []
    for number, line in enumerate((folder / "record.jsonl").read_text().splitlines()):
        lines.append(line)
        record = json.loads(line)
        if record["kind"] == "steps" and number % 5 == 0:
            lines.append(json.dumps(resources(record["t"], record["step"], USED, USED)))
    (folder / "record.jsonl").write_text("\n".join(lines) + "\n")
    assert len(USED) == len(RESOURCE_NAMES)
    return folder


def append(folder: Path, *records: dict[str, Any] | str) -> None:
    """Add records, or raw text, to a run's record."""
    with (folder / "record.jsonl").open("a") as file:
        for record in records:
            file.write(record if isinstance(record, str) else json.dumps(record) + "\n")


def start(step: int = 0, t: float = 100.0, **more: Any) -> dict[str, Any]:
    """A `start` of two ranks and 10 epochs of 10 steps."""
    return {
        "t": t, "kind": "start", "world_size": 2, "epochs": 10, "steps_per_epoch": 10, "start_step": step,
        "model": "mlp", "data": "digits", "device": "cpu", "hosts": ["a", "a"], "pids": [1, 2], **more,
    }  # fmt: skip


def resources(t: float, step: int, *rows: list[float]) -> dict[str, Any]:
    """A sample of what ranks use; an empty row is a rank that sampled nothing new."""
    return {"kind": "resources", **vars(Resources.of(step, rows)), "t": t}


def steps(step: int, t: float, loss: float = 1.0, n: int = 5) -> dict[str, Any]:
    """A window of `n` steps that ends at `step`."""
    return {
        "t": t, "kind": "steps", "epoch": (step - 1) // 10, "step": step, "losses": [loss] * n, "correct": 16 * n,
        "samples": 32 * n, "seconds": 0.5, "phase_names": ["forward", "communicate"],
        "phases": [[0.4, 0.1], [0.3, 0.2]], "wire_bytes": 1000 * n, "memory_bytes": [1e8, 2e8],
    }  # fmt: skip
