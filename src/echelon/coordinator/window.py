"""Sums of finished tasks for the run's record: losses in order of the steps, samples, phases by worker."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from statistics import fmean

from echelon.coordinator.messages import MovedBytes, TaskReport
from echelon.observe.phases import PAUSES, PHASE_NAMES, PHASES
from echelon.records.kinds import RESOURCE_NAMES, Steps

WINDOW_S = 0.5


@dataclass
class WindowAccumulator:
    """Adds up finished tasks from `began_s` on. Shares of one step are added to one loss."""

    began_s: float
    losses: dict[int, list[float]] = field(default_factory=dict)
    score: float | None = None
    samples: int = 0
    lr: float = 0.0
    moved: MovedBytes = field(default_factory=MovedBytes)
    phases: dict[str, list[float]] = field(default_factory=dict)
    latest: dict[str, TaskReport] = field(default_factory=dict)
    resources: dict[str, list[float]] = field(default_factory=dict)
    gc_s: dict[str, float] = field(default_factory=dict)
    coded: dict[str, dict[str, float]] = field(default_factory=dict)
    pauses: dict[str, list[float]] = field(default_factory=dict)

    def add(self, worker: str, step: int, report: TaskReport, counted: bool) -> None:
        """Add a finished task; one that was not counted into the parameters adds only its time."""
        if counted:
            self.losses.setdefault(step, []).append(report.loss)
            if report.score is not None:
                self.score = (self.score or 0.0) + report.score
            self.samples += report.samples
            self.lr = report.lr
        row = self.phases.setdefault(worker, [0.0] * len(PHASES))
        for i, seconds in enumerate(report.phases[: len(PHASES)]):
            row[i] += seconds
        before = self.pauses.get(worker, [0.0] * len(PAUSES))
        self.pauses[worker] = [s + report.pauses.get(name, 0.0) for name, s in zip(PAUSES, before, strict=True)]
        self.gc_s[worker] = self.gc_s.get(worker, 0.0) + report.gc_s
        self.latest[worker] = report
        if report.resources:
            self.resources[worker] = report.resources[: len(RESOURCE_NAMES)]
        if report.entropy_coded:
            self.coded[worker] = report.entropy_coded

    def add_bytes(self, moved: MovedBytes) -> None:
        """Add what a worker moved since its last report."""
        now = self.moved
        self.moved = MovedBytes(now.sent + moved.sent, now.received + moved.received, now.other + moved.other)

    @property
    def all_bytes(self) -> int:
        """All bytes of no window so far."""
        return self.moved.sent + self.moved.received + self.moved.other

    def has_steps(self, below: float = math.inf) -> bool:
        """Whether a step before `below` was finished."""
        return any(step < below for step in self.losses)

    def due(self, now_s: float, below: float = math.inf) -> bool:
        """Whether it is time to close the window."""
        return now_s - self.began_s >= WINDOW_S and self.has_steps(below)

    def close(
        self, epoch: int, step: int, workers: list[str], now_s: float, below: float = math.inf
    ) -> tuple[Steps, WindowAccumulator]:
        """Return the window, with a row for each of the workers, in their order, and the next window's accumulator.

        Args:
            below: steps from here on are not complete: their loss waits for the window in which they are.
        """
        zeros, latest = [0.0] * len(PHASES), self.latest
        densities = [report.density for report in latest.values() if report.density is not None]
        seen = [i for i in range(len(PAUSES)) if any(seconds[i] for seconds in self.pauses.values())]
        paused = {w: [self.pauses[w][i] if w in self.pauses else 0.0 for i in seen] for w in workers}
        waiting = {s: loss for s, loss in self.losses.items() if s >= below}
        steps = Steps(
            epoch=epoch,
            step=step,
            losses=[math.fsum(self.losses[s]) for s in sorted(self.losses.keys() - waiting.keys())],
            correct=self.score,
            samples=self.samples,
            lr=self.lr,
            seconds=now_s - self.began_s,
            phase_names=(
                *PHASE_NAMES,
                *(PAUSES[i] for i in seen),
            ),  # a pause of one is no pause of all: seconds hold it
            phases=[self.phases.get(w, zeros) + paused[w] for w in workers],
            wire_bytes=self.moved.sent + self.moved.received,  # servers send what workers pull
            wire_bytes_by_group={"pushed": self.moved.sent, "pulled": self.moved.received},
            other_wire_bytes=self.moved.other,
            density=fmean(densities) if densities else None,
            memory_bytes=[latest[w].memory_bytes if w in latest else 0 for w in workers],
            gc_s=[self.gc_s.get(w, 0.0) for w in workers],
        )
        return steps, WindowAccumulator(now_s, waiting, coded=self.coded)

    def entropy_coded(self) -> dict[str, float]:
        """Return what entropy coding did to all workers' messages since they began; empty without it."""
        names = sorted({name for coded in self.coded.values() for name in coded})
        return {name: sum(coded.get(name, 0.0) for coded in self.coded.values()) for name in names}
