"""Sums of finished tasks for the run's record: losses in order of the steps, samples, phases by worker."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import fmean

from echelon.coordinator.messages import MovedBytes, TaskReport
from echelon.observe.phases import CALLBACKS, PAUSES, PHASE_NAMES, PHASES, RECORDING
from echelon.records.kinds import RESOURCE_NAMES, Steps

WINDOW_S = 0.5
_WHOLE = 1 - 1e-9


@dataclass
class WindowAccumulator:
    """Adds up finished tasks from `began_s` on. Shares of one step are added to one loss.

    Attributes:
        losses: of each share of a step, with how much of the batch it is.
        rates: learning rates by step, from the newest step of the windows before on.
        pauses: seconds by worker and name.
        paused: what workers do between steps that is not over, and since when.
    """

    began_s: float
    losses: dict[int, list[tuple[float, float]]] = field(default_factory=dict)
    score: float | None = None
    samples: int = 0
    rates: dict[int, float] = field(default_factory=dict)
    moved: MovedBytes = field(default_factory=MovedBytes)
    phases: dict[str, list[float]] = field(default_factory=dict)
    latest: dict[str, TaskReport] = field(default_factory=dict)
    resources: dict[str, list[float]] = field(default_factory=dict)
    gc_s: dict[str, float] = field(default_factory=dict)
    coded: dict[str, dict[str, float]] = field(default_factory=dict)
    pauses: dict[str, dict[str, float]] = field(default_factory=dict)
    paused: dict[str, tuple[str, float]] = field(default_factory=dict)

    def pause(self, worker: str, name: str, now_s: float) -> None:
        """Hear that a worker is given something between its steps, which may last over several windows."""
        self.paused.setdefault(worker, (name, now_s))

    def resume(self, worker: str, now_s: float) -> None:
        """Hear that a worker is done with what it was given, or left."""
        name, since_s = self.paused.pop(worker, ("", now_s))
        self._add_pause(worker, name, now_s - max(since_s, self.began_s))

    def _add_pause(self, worker: str, name: str, seconds: float) -> None:
        if seconds > 0:
            of_worker = self.pauses.setdefault(worker, {})
            of_worker[name] = of_worker.get(name, 0.0) + seconds

    def add(self, worker: str, step: int, report: TaskReport, counted: bool, now_s: float) -> None:
        """Add a finished task; one that was not counted into the parameters adds only its time.

        A worker is given what is next while it computes: a pause that it was given meanwhile begins now.
        """
        if worker in self.paused:
            self.paused[worker] = (self.paused[worker][0], now_s)
        if counted:
            self.losses.setdefault(step, []).append((report.loss, report.share))
            if report.score is not None:
                self.score = (self.score or 0.0) + report.score
            self.samples += report.samples
            self.rates[step] = report.lr
        row = self.phases.setdefault(worker, [0.0] * len(PHASES))
        for i, seconds in enumerate(report.phases[: len(PHASES)]):
            row[i] += seconds
        for name in (RECORDING, CALLBACKS):  # the others are known before a worker tells of them
            self._add_pause(worker, name, report.pauses.get(name, 0.0))
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

    def has_steps(self, complete: Callable[[int], bool]) -> bool:
        """Whether a step is complete."""
        return any(complete(step) for step in self.losses)

    def due(self, now_s: float, complete: Callable[[int], bool]) -> bool:
        """Whether it is time to close the window."""
        return now_s - self.began_s >= WINDOW_S and self.has_steps(complete)

    def close(
        self, epoch: int, step: int, workers: list[str], now_s: float, complete: Callable[[int], bool]
    ) -> tuple[Steps, WindowAccumulator]:
        """Return the window, with a row for each of the workers, in their order, and the next window's accumulator.

        While one worker pauses, the others go on: the window's seconds of steps are what a worker has for them, the
        mean of the workers.

        Args:
            complete: tells whether a step is; the loss of others waits for the window in which they are.
        """
        zeros, latest = [0.0] * len(PHASES), self.latest
        densities = [report.density for report in latest.values() if report.density is not None]
        for worker, (name, since_s) in self.paused.items():
            self._add_pause(worker, name, now_s - max(since_s, self.began_s))
        pauses = [[self.pauses.get(w, {}).get(name, 0.0) for name in PAUSES] for w in workers]
        paused_s = math.fsum(map(sum, pauses)) / max(1, len(pauses))
        waiting = {s: loss for s, loss in self.losses.items() if not complete(s)}
        newest = max((s for s in self.rates if complete(s)), default=None)
        steps = Steps(
            epoch=epoch,
            step=step,
            losses=[_mean(self.losses[s]) for s in sorted(self.losses.keys() - waiting.keys())],
            correct=self.score,
            samples=self.samples,
            lr=self.rates[newest] if newest is not None else None,
            seconds=max(0.0, now_s - self.began_s - paused_s),
            phase_names=PHASE_NAMES,
            phases=[self.phases.get(w, zeros) for w in workers],
            wire_bytes=self.moved.sent + self.moved.received,  # servers send what workers pull
            wire_bytes_by_group={"pushed": self.moved.sent, "pulled": self.moved.received},
            other_wire_bytes=self.moved.other,
            density=fmean(densities) if densities else None,
            memory_bytes=[latest[w].memory_bytes if w in latest else 0 for w in workers],
            gc_s=[self.gc_s.get(w, 0.0) for w in workers],
            pause_names=PAUSES,
            pauses=pauses,
        )
        rates = {s: rate for s, rate in self.rates.items() if newest is None or s >= newest}  # steps end in any order
        return steps, WindowAccumulator(now_s, waiting, rates=rates, coded=self.coded, paused=self.paused)

    def entropy_coded(self) -> dict[str, float]:
        """Return what entropy coding did to all workers' messages since they began; empty without it."""
        names = sorted({name for coded in self.coded.values() for name in coded})
        return {name: sum(coded.get(name, 0.0) for coded in self.coded.values()) for name in names}


def _mean(shares: list[tuple[float, float]]) -> float:
    """Return the loss of a step: the mean over the shares that came (not those of backups or of an earlier launch)."""
    loss, of_batch = math.fsum(loss for loss, _ in shares), math.fsum(share for _, share in shares)
    return loss / of_batch if 0 < of_batch < _WHOLE else loss
