"""How far a run that goes on has come, read from the end of its record."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from echelon.reporting.live.follow import Follower, Json


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
        self._follower = Follower(folder)
        self._progress = Progress()

    def read(self) -> Progress:
        """Return how far the run is now; a line that is not whole yet is left for the next time."""
        anew, records = self._follower.read()
        if anew:
            self._progress = Progress()
        for record in records:
            self._progress = _after(self._progress, record)
        return self._progress


def _after(progress: Progress, record: Json) -> Progress:
    try:
        match record["kind"]:
            case "start":
                return replace(progress, total_steps=int(record["steps_per_epoch"]) * int(record["epochs"]))
            case "steps":
                done = int(record["step"]) / progress.total_steps if progress.total_steps else 0.0
                rate = float(record["samples"]) / max(float(record["seconds"]), 1e-9)
                return replace(progress, done=min(1.0, done), samples_per_s=rate)
            case "evaluation":
                return replace(progress, top1=float(record["metrics"]["top1"]))
    except (ValueError, KeyError, TypeError, AttributeError):
        pass  # strange: the report counts and names it, a progress bar has nothing to say
    return progress
