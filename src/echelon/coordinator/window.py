"""What a run's record shows of leased training: losses in order of the steps, samples, phases per worker."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from echelon.observe.phases import PHASES
from echelon.records.kinds import RESOURCE_NAMES

WINDOW_S = 0.5


@dataclass(frozen=True)
class WindowSums:
    """What all workers did since the last window; `phases` has one row per worker, in seconds.

    So has `resources`; a row is empty where a worker sampled nothing new. `gc_s`: by worker, in garbage collections.
    `density`: share of elements that the workers' last pushes carried, their mean; None without a sparse codec.
    `other_bytes`: of copies of the servers' keys that workers gave or read, for the setup, evaluations and checkpoints.
    """

    epoch: int
    step: int
    losses: list[float]
    score: float | None
    samples: int
    seconds: float
    lr: float
    phases: list[list[float]]
    memory_bytes: list[int]
    pushed_bytes: int
    pulled_bytes: int
    other_bytes: int
    density: float | None
    resources: list[list[float]]
    gc_s: list[float]


@dataclass
class WindowAccumulator:
    """Sums of finished tasks. Shares of one step are added to one loss."""

    losses: dict[int, float] = field(default_factory=dict)
    score: float | None = None
    samples: int = 0
    lr: float = 0.0
    phases: dict[str, list[float]] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    sent_bytes: int = 0
    received_bytes: int = 0
    other_bytes: int = 0
    density: dict[str, float] = field(default_factory=dict)
    resources: dict[str, list[float]] = field(default_factory=dict)
    gc_s: dict[str, float] = field(default_factory=dict)
    began_s: float = field(default_factory=time.monotonic)

    def add(self, worker: str, step: int, info: dict[str, Any], counted: bool) -> None:
        """Add a finished task; one that was not counted into the parameters adds only its time."""
        if counted:
            self.losses[step] = self.losses.get(step, 0.0) + float(info["loss"])
            if (score := info.get("score")) is not None:
                self.score = (self.score or 0.0) + float(score)
            self.samples += int(info["samples"])
            self.lr = float(info["lr"])
        row = self.phases.setdefault(worker, [0.0] * len(PHASES))
        for i, seconds in enumerate(info["phases"][: len(PHASES)]):
            row[i] += float(seconds)
        self.gc_s[worker] = self.gc_s.get(worker, 0.0) + float(info.get("gc_s", 0.0))
        self.memory[worker] = int(info["memory_bytes"])
        self.add_bytes(info["bytes"])
        if (share := info.get("density")) is not None:
            self.density[worker] = float(share)
        if own := info.get("resources"):
            self.resources[worker] = [float(v) for v in own[: len(RESOURCE_NAMES)]]

    def add_bytes(self, moved: dict[str, Any]) -> None:
        """Add what a worker moved since its last report."""
        sent, received, other = int(moved["sent"]), int(moved["received"]), int(moved["other"])
        self.sent_bytes += sent
        self.received_bytes += received
        self.other_bytes += other

    @property
    def bytes(self) -> int:
        """All bytes of no window so far."""
        return self.sent_bytes + self.received_bytes + self.other_bytes

    def has_steps(self, below: float = math.inf) -> bool:
        """Whether a step before `below` was finished."""
        return any(step < below for step in self.losses)

    def due(self, now_s: float, below: float = math.inf) -> bool:
        """Whether it is time to close the window."""
        return self.has_steps(below) and now_s - self.began_s >= WINDOW_S

    def close(self, epoch: int, step: int, workers: list[str], below: float = math.inf) -> WindowSums:
        """Return the sums and begin anew.

        Args:
            below: steps from here on are not complete: their loss waits for the window in which they are.
        """
        zeros = [0.0] * len(PHASES)
        waiting = {s: loss for s, loss in self.losses.items() if s >= below}
        sums = WindowSums(
            epoch, step, [self.losses[s] for s in sorted(self.losses.keys() - waiting.keys())],
            self.score, self.samples,
            time.monotonic() - self.began_s, self.lr, [self.phases.get(w, zeros) for w in workers],
            [self.memory.get(w, 0) for w in workers], self.sent_bytes, self.received_bytes, self.other_bytes,
            fmean(self.density.values()) if self.density else None, [self.resources.get(w, []) for w in workers],
            [self.gc_s.get(w, 0.0) for w in workers],
        )  # fmt: skip
        self.__init__(waiting)  # type: ignore[misc]
        return sums
