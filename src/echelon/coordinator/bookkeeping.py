"""The scheduler's part of the run's record: windows of steps, workers' clocks and waiting, servers' load."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from echelon.coordinator.members import RunMember
from echelon.coordinator.shares import SharedLeases
from echelon.coordinator.window import WindowAccumulator
from echelon.records.decode import decode
from echelon.records.kinds import EntropyCoding, ServerWindow, WorkerWindow

if TYPE_CHECKING:
    from echelon.coordinator.scheduler import Scheduler

REPORT_S = 2.0


class Bookkeeping:
    """Sums of finished tasks, written as windows; a window begins when work begins, and none reaches past its end.

    That keeps each window's wall time equal to what the workers' phases add up to: neither the roles' start nor the
    last evaluation is time of a step.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._tally = WindowAccumulator()
        self._late = 0
        self._coded: dict[str, dict[str, float]] = {}
        self._report_s = 0.0
        self._started = False

    def started(self, info: dict[str, Any]) -> None:
        """The setup is done: time counts from here."""
        self._tally = WindowAccumulator()
        if not self._started:
            self._started = True
            self._scheduler.callbacks.started(info)

    def add(self, worker: str, step: int, info: dict[str, Any], counted: bool) -> None:
        """Add a finished task."""
        self._late += bool(info.get("late"))
        self._tally.add(worker, step, info, counted)
        if coded := info.get("entropy_coded"):
            self._coded[worker] = {str(name): float(value) for name, value in dict(coded).items()}

    def add_bytes(self, moved: dict[str, Any]) -> None:
        """Add what a worker moved that reports no lease."""
        self._tally.add_bytes(moved)

    @property
    def bytes_left(self) -> int:
        """What workers moved that is in no window: after the last one, for the last evaluation and checkpoint."""
        return self._tally.bytes

    def close_window(self) -> None:
        """Write what is summed, however short: what comes now is no step."""
        if self._tally.has_steps(self._complete_below()):
            self._flush()

    def turn(self, now_s: float) -> None:
        """Write what is due."""
        if self._scheduler.assignment.setup is not None and self._tally.due(now_s, self._complete_below()):
            self._flush()
        if now_s >= self._report_s:
            self._report_s = now_s + REPORT_S
            for server in self._scheduler.roster.members.of_role("server"):
                self.report_server(server)

    def _complete_below(self) -> float:
        """Return the step from which on steps may have shares that are not done."""
        leases = self._scheduler.assignment.leases
        return leases.done_steps if isinstance(leases, SharedLeases) else math.inf

    def _flush(self) -> None:
        assignment = self._scheduler.assignment
        if assignment.setup is None:
            return
        step = assignment.steps()
        epoch = max(0, step - 1) // int(assignment.setup["steps_per_epoch"])
        workers = [m.name for m in self._scheduler.roster.members.of_role("worker")]
        self._scheduler.callbacks.window(self._tally.close(epoch, step, workers, self._complete_below()))
        self._record_workers(step)

    def _record_workers(self, step: int) -> None:
        leases = self._scheduler.assignment.leases
        assert leases is not None
        beats = {m.name: m.beat for m in self._scheduler.roster.members.of_role("worker")}
        window = WorkerWindow(
            step=step, clocks=leases.clocks, late=self._late,
            waited_s={name: beat.get("waited_s", {}) for name, beat in beats.items()},
            sent_bytes={name: beat.get("sent_bytes", 0) for name, beat in beats.items()},
            received_bytes={name: beat.get("received_bytes", 0) for name, beat in beats.items()},
        )  # fmt: skip
        self._scheduler.record.write(window)
        if self._coded:
            names = sorted({name for coded in self._coded.values() for name in coded})
            sums = {name: sum(coded.get(name, 0) for coded in self._coded.values()) for name in names}
            self._scheduler.record.write(EntropyCoding(step, **sums))

    def report_server(self, server: RunMember) -> None:
        """Write a server's last numbers."""
        assignment = self._scheduler.assignment
        if server.beat and assignment.setup is not None:
            values = {**server.beat, "name": server.name, "step": assignment.steps()}
            self._scheduler.record.write(decode(ServerWindow, values))
