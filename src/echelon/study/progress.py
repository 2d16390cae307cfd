"""How far a run that goes on has come, read from the end of its record."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from echelon.observe.record import RECORD_FILE


@dataclass(frozen=True)
class Progress:
    """What the record says so far; `done` is a share of the run's steps."""

    done: float = 0.0
    top1: float | None = None
    samples_per_s: float | None = None
    total_steps: int = 0


class Tail:
    """Follows one run's record: each `read` looks only at what was added."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / RECORD_FILE
        self._offset = 0
        self._progress = Progress()

    def read(self) -> Progress:
        """Return how far the run is now; a line that is not whole yet is left for the next time."""
        if self._path.exists():
            with self._path.open("rb") as file:
                file.seek(self._offset)
                added = file.read()
            whole, newline, _ = added.rpartition(b"\n")
            self._offset += len(whole) + len(newline)
            for line in whole.splitlines():
                self._progress = _after(self._progress, line)
        return self._progress


def _after(progress: Progress, line: bytes) -> Progress:
    try:
        record: Any = json.loads(line)
        match record.get("kind"):
            case "start":
                return replace(progress, total_steps=int(record["steps_per_epoch"]) * int(record["epochs"]))
            case "steps":
                done = int(record["step"]) / progress.total_steps if progress.total_steps else 0.0
                rate = float(record["samples"]) / max(float(record["seconds"]), 1e-9)
                return replace(progress, done=min(1.0, done), samples_per_s=rate)
            case "evaluation":
                return replace(progress, top1=float(record["metrics"]["top1"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        pass  # torn or strange: the report says so, a progress bar has nothing to say
    return progress
