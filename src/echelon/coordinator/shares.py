"""Leases where gradients are aggregated: a step is cut into shares, and the next begins when it is complete.

Where workers begin it ahead, who has computed its share of a step has the one of the next step already, and waits in
its forward pass for each parameter of the new version. Such a step is cut as the present one is, and stays cut so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from echelon.coordinator.config import CoordinationPolicy
from echelon.coordinator.leases import FreeLeases, Lease, LeaseLedger, StepCount
from echelon.coordinator.messages import TrainTask

MAX_SHARES = 4096


@dataclass
class AheadStep:
    """The step behind the present one, where it is cut: into how many shares, of whom, what is given out and done."""

    shares: int
    owners: dict[int, str] = field(default_factory=dict)
    out: dict[int, Lease] = field(default_factory=dict)
    done: set[int] = field(default_factory=set)


class SharedLeases(LeaseLedger):
    """Synchronous: a step is cut into one share per worker; `backup` of them need not come (Chen et al. 2016).

    Each worker has the share of its place among their names, in every step: what codecs leave out in a worker is then
    of the same samples whenever the run is repeated. Without backups a worker that evaluates keeps its share, for
    another cut of the batch would round otherwise.

    Args:
        ahead: who has its share of the present step is given that of the next one, but not of a step before which an
            evaluation or a checkpoint may be due: an epoch's first, and every `save_steps`-th.
    """

    def __init__(self, work: StepCount, backup: int = 0, ahead: bool = False, save_steps: int | None = None) -> None:
        super().__init__(work)
        self._backup = backup
        self._begins_ahead, self._save_steps = ahead, save_steps
        self._ahead: AheadStep | None = None
        self._cuts: list[tuple[int, int]] = []
        self._back: list[tuple[str, int]] = []  # withdrawn, and not told of yet
        self._step = 0
        self._shares = 0
        self._free: list[int] = []
        self._workers: set[str] = set()
        self._had: set[str] = set()
        self._owners: dict[int, str] = {}
        self._moved_s = 0.0  # when a share was taken or done last

    def restore(self, below: int, done: Iterable[int]) -> None:
        """Begin at a step; one that was half done begins anew."""
        self._begin(below)

    def replay(self, below: int, done: Iterable[int], shares: Mapping[int, int]) -> None:
        """Begin at the first step that a journal does not complete, with those of its shares that are done."""
        by_step: dict[int, set[int]] = {}
        for task in done:
            by_step.setdefault(self.step_of(task), set()).add(task)
        step = max(self._step, below)
        while step in shares and len(by_step.get(step, ())) >= max(1, shares[step] - self._backup):
            step += 1
        self._begin(step)
        if step in shares:
            if step + 1 in shares:
                self._ahead = AheadStep(shares[step + 1], done=by_step.get(step + 1, set()))
            self.cut(step, shares[step], by_step.get(step, set()))

    def counted(self) -> tuple[int, set[int]]:
        """Return the present step, and the tasks done of it and of the one begun ahead."""
        return self._step, self._done | (self._ahead.done if self._ahead else set())

    def cuts(self) -> dict[int, int]:
        """Return into how many shares each step is cut that is not complete."""
        cut = {self._step: self._shares} if self._shares else {}
        return cut | ({self._step + 1: self._ahead.shares} if self._ahead else {})

    def new_cuts(self) -> list[tuple[int, int]]:
        """Return steps that were cut since the last call, each with the number of its shares."""
        new, self._cuts = self._cuts, []
        return new

    def step_of(self, task: int) -> int:
        """Return the step that a share is part of."""
        return task // MAX_SHARES

    def _begin(self, step: int) -> None:
        self._step, self._shares, self._ahead = step, 0, None
        self._free, self._done, self._had, self._out, self._owners = [], set(), set(), {}, {}

    def _next_step(self, now_s: float) -> None:
        """Begin the next step: that which was begun ahead, with what is given out and done of it.

        How long a lease of it takes counts from now: before, it had to wait for this.
        """
        ahead = self._ahead
        self._begin(self._step + 1)
        if ahead is None:
            return
        self._shares, self._owners, self._done = ahead.shares, ahead.owners, ahead.done
        self._out = {task: Lease(lease.worker, now_s) for task, lease in ahead.out.items()}
        taken = self._out.keys() | self._done
        self._free = [share for share in range(self._shares) if self._task_of(share) not in taken]
        done_by = {ahead.owners[task % MAX_SHARES] for task in ahead.done if ahead.owners}
        self._had = done_by | {lease.worker for lease in self._out.values()}
        self._close_if_complete(now_s)

    def _task_of(self, share: int, step: int | None = None) -> int:
        return (self._step if step is None else step) * MAX_SHARES + share

    @property
    def clocks(self) -> dict[str, int]:
        """The step that each worker is at."""
        return dict.fromkeys(self._workers, self._step)

    @property
    def done_steps(self) -> int:
        """Steps before the present one."""
        return self._step

    @property
    def finishes(self) -> bool:
        """Where it is cut: of a half-done step some keys have gradients that others lack."""
        return self._shares > 0

    def under_way(self, now_s: float) -> bool:
        """Whether the present step is cut, and its shares come and go no later than others did."""
        return self._shares > 0 and bool(self._workers) and now_s - self._moved_s <= self._pace.deadline_s()

    @property
    def at_boundary(self) -> bool:
        """Whether the present step has not been cut yet."""
        return self._shares == 0

    def join(self, worker: str, holding: Iterable[int], now_s: float) -> None:
        """Let a worker take part, from the next cut on; shares that it works on already are its leases."""
        self._workers.add(worker)
        for task in holding:
            self._reopen(task, worker, now_s)

    def _reopen(self, task: int, worker: str, now_s: float) -> None:
        step, share = divmod(task, MAX_SHARES)
        if step == self._step and share in self._free:
            self._free.remove(share)
            self._out[task] = Lease(worker, now_s)
            self._had.add(worker)
        elif step == self._step + 1 and self._ahead is not None and task not in self._ahead.done:
            self._ahead.out.setdefault(task, Lease(worker, now_s))

    def cut(self, step: int, shares: int, done: Iterable[int]) -> None:
        """After a restart: the present step was cut into so many shares, of which some are done."""
        if step == self._step:
            self._shares = shares
            self._done = set(done)
            self._free = [s for s in range(shares) if step * MAX_SHARES + s not in self._done]
            self._close_if_complete()

    def leave(self, worker: str) -> list[int]:
        """Forget a worker; returns its tasks, whose shares are free again."""
        back = self._take_back(worker)
        self._free.extend(task % MAX_SHARES for task in back)
        self._workers.discard(worker)
        self._had.discard(worker)
        ahead = self._ahead.out if self._ahead else {}
        for task in [task for task, lease in ahead.items() if lease.worker == worker]:
            del ahead[task]
            back.append(task)
        return back

    def has_lease(self, worker: str) -> bool:
        """Whether a worker has a task that it has not finished."""
        ahead = self._ahead.out.values() if self._ahead else ()
        return super().has_lease(worker) or any(lease.worker == worker for lease in ahead)

    def withdraw(self) -> list[tuple[str, int]]:
        """Take back what workers have begun ahead where a share of the present step waits for one of them, or was given
        to it since.

        They wait for values that only that share makes complete. Returns each worker with its task.
        """
        if self._unclaimed():
            self._take_back_ahead(set(self._workers))
        back, self._back = self._back, []
        return back

    def _take_back_ahead(self, workers: set[str]) -> None:
        out = self._ahead.out if self._ahead else {}
        for task in [task for task, lease in out.items() if lease.worker in workers]:
            self._back.append((out.pop(task).worker, task))

    @property
    def shares(self) -> int:
        """Into how many shares the present step is cut; 0: not yet."""
        return self._shares

    def take(self, worker: str, now_s: float) -> TrainTask | None:
        """Give a worker a share, and cut the step first where nobody has; None where the step's shares are others'."""
        if self.complete or (self._held_back and not self._shares) or worker not in self._taking_part():
            return None
        if self._shares == 0:
            self._owners = dict(enumerate(sorted(self._taking_part())))
            self._shares = max(1, len(self._owners))
            self._free = list(range(self._shares))
            self._cuts.append((self._step, self._shares))
        self._overdue(now_s)
        return self._take_present(worker, now_s) or self._take_ahead(worker, now_s)

    def _take_present(self, worker: str, now_s: float) -> TrainTask | None:
        if any(lease.worker == worker and not lease.again for lease in self._out.values()):
            return None
        waiting = self._taking_part() - self._had - {worker}
        if not self._free or (worker in self._had and len(self._free) <= len(waiting)):
            return None
        coming = len(self._done) + len(self._out) + len(waiting)
        if worker in self._had and self._backup and coming >= max(1, self._shares - self._backup):
            return None  # the step will be complete without the share that nobody has
        share = self._pick(worker, waiting)
        if share is None:
            return None
        self._free.remove(share)
        self._moved_s = now_s
        self._take_back_ahead({worker})
        self._out[self._task_of(share)] = Lease(worker, now_s)
        self._had.add(worker)
        return self._as_task(self._step, share, self._shares)

    def _take_ahead(self, worker: str, now_s: float) -> TrainTask | None:
        """Give a worker its share of the next step, where it has that of this one, and each other share its owner."""
        step, workers = self._step + 1, set(self._owners.values())
        if not self._begins_ahead or self._held_back or worker not in self._had or self._unclaimed():
            return None
        if workers != self._taking_part() or step >= self._work.steps or self._ends_with_pause(step):
            return None
        if self._ahead is None:
            self._ahead = AheadStep(self._shares, dict(self._owners))
            self._cuts.append((step, self._shares))
        ahead = self._ahead
        own = next((share for share, owner in self._owners.items() if owner == worker), -1)
        task = self._task_of(own, step)
        is_same_cut = ahead.owners == self._owners and ahead.shares == self._shares
        if not is_same_cut or task in ahead.done or any(lease.worker == worker for lease in ahead.out.values()):
            return None
        ahead.out[task] = Lease(worker, now_s)
        return self._as_task(step, own, self._shares)

    def _unclaimed(self) -> list[int]:
        """Return the free shares of the present step whose owners will not come for them."""
        coming = self._taking_part() - self._had
        return [share for share in self._free if self._owners.get(share) not in coming]

    def _ends_with_pause(self, step: int) -> bool:
        """Whether evaluations or checkpoints are due, by the number of steps, before a step begins."""
        return step % self._work.steps_per_epoch == 0 or (self._save_steps is not None and step % self._save_steps == 0)

    def _as_task(self, step: int, share: int, shares: int) -> TrainTask:
        epoch, batch = divmod(step, self._work.steps_per_epoch)
        return TrainTask(self._task_of(share, step), step, epoch, batch, share, shares)

    def _taking_part(self) -> set[str]:
        return self._workers - self._paused if self._backup else self._workers

    def _pick(self, worker: str, waiting: set[str]) -> int | None:
        """Return the worker's own share where it is free, else one that none of `waiting` will come for."""
        free = [share for share in self._free if self._owners.get(share) not in waiting]
        return min(free, key=lambda share: self._owners.get(share) != worker, default=None)

    def _overdue(self, now_s: float) -> None:
        """Offer to others what takes too long."""
        deadline_s = self._pace.deadline_s()
        for task, lease in self._out.items():
            if now_s - lease.since_s > deadline_s and not lease.again:
                lease.again = True
                self._free.append(task % MAX_SHARES)

    def finish(self, task: int, worker: str, now_s: float, late: bool) -> bool:
        """Count a share, and close the step with the last one needed; returns whether it was counted the first time."""
        if self._ahead is not None and self.step_of(task) == self._step + 1:
            is_first = task not in self._ahead.done
            self._ahead.out.pop(task, None)
            self._ahead.done.add(task)
            return is_first and not late
        lease = self._out.pop(task, None)
        if lease is not None and lease.worker == worker:
            self._pace.seconds.append(now_s - lease.since_s)
        if task // MAX_SHARES != self._step or task in self._done:
            return False
        if task % MAX_SHARES in self._free:
            self._free.remove(task % MAX_SHARES)
        self._done.add(task)
        self._moved_s = now_s
        self._close_if_complete(now_s)
        return not late

    def _close_if_complete(self, now_s: float = 0.0) -> None:
        """Begin the next step where the present one is done; leases that are out ahead count from now on."""
        if self._shares and len(self._done) >= max(1, self._shares - self._backup):
            self._next_step(now_s)

    def lost(self, stored: set[int], least: int) -> list[int]:
        """Give out again the shares of the present step that a server has not, though they were done; returns them.

        The server has the tasks `stored`, and is complete before the step `least`.
        """
        back = sorted(self._done - stored) if self._step >= least else []
        self._done.difference_update(back)
        self._free.extend(task % MAX_SHARES for task in back)
        if self._ahead is not None and self._step + 1 >= least:
            self._ahead.done.intersection_update(stored)
        return back


def make_leases(
    work: StepCount, policy: CoordinationPolicy, batch_parts: int = 1, save_steps: int | None = None
) -> LeaseLedger:
    """Return the way to give out work that a policy asks for; where steps need not be complete, in so many parts.

    Args:
        save_steps: after so many steps a checkpoint is due; None: after no number of them.
    """
    if policy.shared:
        return SharedLeases(work, policy.backup, policy.ahead, save_steps)
    return FreeLeases(work, policy.bound, batch_parts)
