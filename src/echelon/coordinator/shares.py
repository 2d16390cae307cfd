"""Leases where gradients are aggregated: a step is cut into shares, and the next begins when it is complete."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from echelon.coordinator.config import CoordinationPolicy
from echelon.coordinator.leases import FreeLeases, Lease, LeaseLedger, StepCount
from echelon.coordinator.messages import TrainTask

MAX_SHARES = 4096


class SharedLeases(LeaseLedger):
    """Synchronous: a step is cut into one share per worker; `backup` of them need not come (Chen et al. 2016).

    Each worker has the share of its place among their names, in every step: what codecs leave out in a worker is then
    of the same samples whenever the run is repeated. Without backups a worker that evaluates keeps its share, for
    another cut of the batch would round otherwise.
    """

    def __init__(self, work: StepCount, backup: int = 0) -> None:
        super().__init__(work)
        self._backup = backup
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
            self.cut(step, shares[step], by_step.get(step, set()))

    def step_of(self, task: int) -> int:
        """Return the step that a share is part of."""
        return task // MAX_SHARES

    def _begin(self, step: int) -> None:
        self._step, self._shares = step, 0
        self._free, self._done, self._had, self._out, self._owners = [], set(), set(), {}, {}

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
        return back

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
        if any(lease.worker == worker and not lease.again for lease in self._out.values()):
            return None
        self._overdue(now_s)
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
        task = self._step * MAX_SHARES + share
        self._out[task] = Lease(worker, now_s)
        self._had.add(worker)
        epoch, batch = divmod(self._step, self._work.steps_per_epoch)
        return TrainTask(task, self._step, epoch, batch, share, self._shares)

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
        lease = self._out.pop(task, None)
        if lease is not None and lease.worker == worker:
            self._pace.seconds.append(now_s - lease.since_s)
        if task // MAX_SHARES != self._step or task in self._done:
            return False
        if task % MAX_SHARES in self._free:
            self._free.remove(task % MAX_SHARES)
        self._done.add(task)
        self._moved_s = now_s
        self._close_if_complete()
        return not late

    def _close_if_complete(self) -> None:
        if self._shares and len(self._done) >= max(1, self._shares - self._backup):
            self._begin(self._step + 1)

    def lost(self, stored: set[int], least: int) -> list[int]:
        """Give out again the shares of the present step that a server has not, though they were done; returns them.

        The server has the tasks `stored`, and is complete before the step `least`.
        """
        back = sorted(self._done - stored) if self._step >= least else []
        self._done.difference_update(back)
        self._free.extend(task % MAX_SHARES for task in back)
        return back


def make_leases(work: StepCount, policy: CoordinationPolicy, batch_parts: int = 1) -> LeaseLedger:
    """Return the way to give out work that a policy asks for; where steps need not be complete, in so many parts."""
    return SharedLeases(work, policy.backup) if policy.shared else FreeLeases(work, policy.bound, batch_parts)
