"""Who works on what: batches as leases, each counted once. Pure bookkeeping; time comes in as an argument.

A step is one global batch of an epoch's order. Where gradients are aggregated (see `shares`) a step is cut into
shares, and the next one begins when the last is complete. Otherwise (`FreeLeases`) each step is cut into as many leases
as any other, and they are given out as fast as workers ask.
"""

from __future__ import annotations

import statistics
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from echelon.coordinator.messages import TrainTask
from echelon.coordinator.runs import to_runs, whole_steps

_FIRST_GUESS_S = 10.0


@dataclass(frozen=True)
class StepCount:
    """How much there is: steps of the whole run and per epoch."""

    steps: int
    steps_per_epoch: int


@dataclass
class Lease:
    """A task that is out: who has it, since when, and whether it was given to another too because it took so long."""

    worker: str
    since_s: float
    again: bool = False


@dataclass
class Pace:
    """How long a task takes, for the deadline of a lease."""

    seconds: deque[float] = field(default_factory=lambda: deque(maxlen=32))

    def deadline_s(self) -> float:
        """After ten times the median a task is given to another worker too; whoever is first counts."""
        return max(5.0, 10 * statistics.median(self.seconds)) if self.seconds else _FIRST_GUESS_S * 6


class LeaseLedger(ABC):
    """What the coordinator asks of either way to give out work; by itself one whose steps are not cut into shares."""

    def __init__(self, work: StepCount) -> None:
        self._work = work
        self._out: dict[int, Lease] = {}
        self._done: set[int] = set()
        self._paused: set[str] = set()
        self._pace = Pace()
        self._held_back = False

    @abstractmethod
    def take(self, worker: str, now_s: float) -> TrainTask | None:
        """Give a worker a task, or None when it must wait."""

    @abstractmethod
    def finish(self, task: int, worker: str, now_s: float, late: bool) -> bool:
        """Count a task; whether it is the first time."""

    @abstractmethod
    def join(self, worker: str, holding: Iterable[int], now_s: float) -> None:
        """Let a worker take part; `holding` is what it works on already (after a restart of the coordinator)."""

    @abstractmethod
    def leave(self, worker: str) -> list[int]:
        """Forget a worker; returns the tasks that it had, which are to be given out again."""

    def pause(self, worker: str, paused: bool) -> None:
        """Do not count on a worker for a while: it evaluates."""
        if paused:
            self._paused.add(worker)
        else:
            self._paused.discard(worker)

    def has_lease(self, worker: str) -> bool:
        """Whether a worker has a task that it has not finished."""
        return any(lease.worker == worker for lease in self._out.values())

    def hold_back(self, wanted: bool) -> None:
        """Begin no further step until a copy is kept, where steps have a boundary at which all servers agree."""
        self._held_back = wanted

    @abstractmethod
    def restore(self, below: int, done: Iterable[int]) -> None:
        """Begin where a checkpoint ended: all below `below` are done (tasks, or steps where tasks are shares)."""

    @abstractmethod
    def replay(self, below: int, done: Iterable[int], shares: Mapping[int, int]) -> None:
        """Count what a journal says: what `counted` returned, and tasks; into how many shares each step was cut."""

    def counted(self) -> tuple[int, set[int]]:
        """Return the step or task before which all are done, and the tasks done from there on (see `replay`)."""
        return self.done_steps, set(self._done)

    def cuts(self) -> dict[int, int]:
        """Return into how many shares each step is cut that is not complete, where steps are cut one by one."""
        return {}

    def new_cuts(self) -> list[tuple[int, int]]:
        """Return steps that were cut since the last call, each with the number of its shares."""
        return []

    def withdraw(self) -> list[tuple[str, int]]:
        """Take back tasks that wait for others which nobody does; returns each worker with its task."""
        return []

    @abstractmethod
    def lost(self, stored: set[int], least: int) -> list[int]:
        """Give out again what a server lacks that has the tasks `stored` and all below `least`; returns those tasks."""

    @abstractmethod
    def step_of(self, task: int) -> int:
        """Return the step that a task is part of."""

    @property
    @abstractmethod
    def clocks(self) -> dict[str, int]:
        """How far each worker is, in steps."""

    @property
    def finished(self) -> dict[str, int]:
        """Steps that each worker finished itself; where every step needs all workers they are as far as it is."""
        return self.clocks

    @property
    def shares(self) -> int:
        """Into how many shares the present step is cut; 0: not yet."""
        return 1

    @property
    def at_boundary(self) -> bool:
        """Whether no step is half done, where that matters."""
        return True

    @property
    def task_s(self) -> float:
        """How long a task takes, the median of the last ones; 0: not known."""
        return statistics.median(self._pace.seconds) if self._pace.seconds else 0.0

    @property
    @abstractmethod
    def done_steps(self) -> int:
        """Steps before which all are done."""

    @property
    def steps(self) -> int:
        """Steps that are done, in whatever order."""
        return self.done_steps

    @property
    def watermark(self) -> int:
        """Tasks before which servers need not remember each one: all are done, and will not be given out again."""
        return 0

    def step_complete(self, step: int) -> bool:
        """Whether all of a step is done."""
        return step < self.done_steps

    @property
    def complete(self) -> bool:
        """Whether all steps of the run are done."""
        return self.done_steps >= self._work.steps

    @property
    def finishes(self) -> bool:
        """Whether tasks are given out until the present step is whole, also of a run that is stopping."""
        return False

    def under_way(self, now_s: float) -> bool:
        """Whether steps will count soon that a last checkpoint has to wait for."""
        return False

    def _take_back(self, worker: str) -> list[int]:
        self._paused.discard(worker)
        back = sorted(task for task, lease in self._out.items() if lease.worker == worker)
        for task in back:
            del self._out[task]
        return back


class FreeLeases(LeaseLedger):
    """Asynchronous: leases are given out as workers ask; with a bound, none is further ahead of the slowest (Ho 2013).

    Each step is cut into `batch_parts` leases, whoever takes them: of P, lease `t` is part `t % P` of step `t // P`.
    """

    def __init__(self, work: StepCount, bound: int | None = None, batch_parts: int = 1) -> None:
        super().__init__(work)
        self._bound, self._parts = bound, batch_parts
        self._tasks = work.steps * batch_parts
        self._next = 0
        self._returned: deque[int] = deque()
        self._below = self._steps = 0
        self._clocks: dict[str, int] = {}
        self._finished: dict[str, int] = {}

    def restore(self, below: int, done: Iterable[int]) -> None:
        """Begin where a checkpoint ended: tasks before `below` are done, and those of `done`."""
        self._below, self._done = below, {t for t in done if t >= below}
        self._next = below
        self._steps = whole_steps(below, to_runs(self._done), self._parts)
        self._advance()

    def replay(self, below: int, done: Iterable[int], shares: Mapping[int, int]) -> None:
        """Count what a journal says as done; into how many shares a step is cut it need not say."""
        self.restore(max(self._below, below), self._done | set(done))

    def counted(self) -> tuple[int, set[int]]:
        """Return the task before which all are done, and those done from there on."""
        return self._below, set(self._done)

    def lost(self, stored: set[int], least: int) -> list[int]:
        """Give nothing out again: workers push again what a server lacks. Returns what is done and is not there."""
        return sorted((set(range(least, self._below)) | self._done) - stored)

    def step_of(self, task: int) -> int:
        """Return the step that a task is part of."""
        return task // self._parts

    def step_complete(self, step: int) -> bool:
        """Whether all parts of a step are done."""
        return all(self._is_done(task) for task in range(step * self._parts, (step + 1) * self._parts))

    @property
    def watermark(self) -> int:
        """The task before which all are done."""
        return self._below

    @property
    def clocks(self) -> dict[str, int]:
        """Tasks that each worker has finished, counted from the slowest when it joined or went on after a pause."""
        return dict(self._clocks)

    @property
    def finished(self) -> dict[str, int]:
        """Steps' worth of tasks that each worker was the first to finish, rounded down."""
        return {worker: self._finished.get(worker, 0) // self._parts for worker in self._clocks}

    @property
    def done_steps(self) -> int:
        """Steps before which all are done."""
        return self._below // self._parts

    @property
    def steps(self) -> int:
        """Steps that are done, in whatever order."""
        return self._steps

    def under_way(self, now_s: float) -> bool:
        """Whether workers have tasks, and have not had them for longer than others take."""
        deadline_s = self._pace.deadline_s()
        return any(now_s - lease.since_s <= deadline_s for lease in self._out.values())

    def join(self, worker: str, holding: Iterable[int], now_s: float) -> None:
        """Let a worker take part, at the clock of the slowest; what it works on already is its lease from now on."""
        self._clocks[worker] = max(self._slowest(), self._clocks.get(worker, 0))
        for task in holding:
            if not self._is_done(task) and task < self._tasks:
                self._out.setdefault(task, Lease(worker, now_s))

    def leave(self, worker: str) -> list[int]:
        """Forget a worker and its clock; returns its tasks, which are the next to be given out."""
        back = self._take_back(worker)
        self._returned.extend(back)
        self._clocks.pop(worker, None)
        return back

    def pause(self, worker: str, paused: bool) -> None:
        """Do not wait for a worker's clock; when it comes back it is as far as the slowest of the others."""
        others = self._slowest()  # before it counts again
        super().pause(worker, paused)
        if not paused and worker in self._clocks:
            self._clocks[worker] = max(self._clocks[worker], others)

    def take(self, worker: str, now_s: float) -> TrainTask | None:
        """Give a worker a task; None where it is paused, would be too far ahead, or where none is left to do."""
        if worker in self._paused:  # all that is done meanwhile would wait for this task's number
            return None
        # What a worker has been given counts: it asks for the next task while it works on one.
        ahead = self._clocks[worker] + sum(lease.worker == worker for lease in self._out.values())
        if self._bound is not None and ahead - self._slowest() > self._bound:
            return None
        task = self._pick(worker, now_s)
        if task is None:
            return None
        self._out[task] = Lease(worker, now_s)
        step, share = divmod(task, self._parts)
        epoch, batch = divmod(step, self._work.steps_per_epoch)
        return TrainTask(task, step, epoch, batch, share, self._parts)

    def _pick(self, worker: str, now_s: float) -> int | None:
        while self._returned:
            task = self._returned.popleft()
            if not self._is_done(task) and task not in self._out:
                return task
        while self._next < self._tasks and (self._is_done(self._next) or self._next in self._out):
            self._next += 1
        if self._next < self._tasks:
            self._next += 1
            return self._next - 1
        deadline_s = self._pace.deadline_s()
        for task, lease in self._out.items():  # nothing else is left: do over what takes too long
            if now_s - lease.since_s > deadline_s and lease.worker != worker and not lease.again:
                lease.again = True
                return task
        return None

    def finish(self, task: int, worker: str, now_s: float, late: bool) -> bool:
        """Count a task and advance the worker's clock; returns whether it is the first time, late or not."""
        lease = self._out.pop(task, None)
        if worker in self._clocks:
            self._clocks[worker] += 1
        if lease is not None and lease.worker == worker:
            self._pace.seconds.append(now_s - lease.since_s)
        if self._is_done(task) or task >= self._tasks:
            return False
        self._done.add(task)
        self._steps += self.step_complete(self.step_of(task))
        self._finished[worker] = self._finished.get(worker, 0) + 1
        self._advance()
        return True

    def _is_done(self, task: int) -> bool:
        return task < self._below or task in self._done

    def _advance(self) -> None:
        while self._below in self._done:
            self._done.discard(self._below)
            self._below += 1

    def _slowest(self) -> int:
        counted = [clock for worker, clock in self._clocks.items() if worker not in self._paused]
        return min(counted, default=min(self._clocks.values(), default=0))
