"""Who works on what: the setup, leases and their journal, and what a server's death undid."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from echelon.coordinator.leases import FreeLeases, StepCount
from echelon.coordinator.members import RunMember
from echelon.coordinator.scheduling import SETUP_TASK
from echelon.coordinator.shares import MAX_SHARES, SharedLeases
from echelon.messages.protocol import Kind
from echelon.records.events import SchedulerRestored, ServerSettled, SharesAgain

if TYPE_CHECKING:
    from echelon.coordinator.scheduler import Scheduler


class Assignment:
    """The part of the scheduler that gives out tasks and counts what is done.

    `begun`: a gradient may have been given out. Until then a server that comes back empty is set up again.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.leases: FreeLeases | SharedLeases | None = None
        self.setup: dict[str, Any] | None = None
        self.setup_worker = ""
        self.asking: dict[str, None] = {}
        self.begun = False
        self._settled = set[int]()

    def steps(self) -> int:
        """Return how many steps are done."""
        return 0 if self.leases is None else self.leases.done_steps + len(self.leases.done_beyond)

    # A former life

    def restore(self) -> None:
        """Take up what a former life wrote down."""
        scheduler, shares, done = self._scheduler, dict[int, int](), dict[int, dict[str, Any]]()
        for entry in scheduler.journal.read():
            match entry["kind"]:
                case "setup":
                    self.setup = entry["info"]
                case "begun":
                    self.begun = True
                case "shares":
                    shares[entry["step"]] = entry["shares"]
                case "done":
                    done[entry["task"]] = entry
                case "epoch" | "best" | "saved":
                    scheduler.reviewing.restore(entry)
                case "ended":
                    scheduler.status = entry["status"]
        if self.setup is None:
            return
        self._make_leases(self.setup)
        self._replay(done, shares)
        words = f"the scheduler came back at step {self.steps()}"
        scheduler.record.write(SchedulerRestored(words, self.steps()))

    def _replay(self, done: dict[int, dict[str, Any]], shares: dict[int, int]) -> None:
        assert self.setup is not None and self.leases is not None
        if isinstance(self.leases, FreeLeases):
            below, beyond = self.leases.done_steps, self.leases.done_beyond
            self.leases.restore(below, beyond | set(done))
            return
        backup, step = self._scheduler.config.policy.backup, self.leases.done_steps
        by_step: dict[int, set[int]] = {}
        for task in done:
            by_step.setdefault(task // MAX_SHARES, set()).add(task)
        while step in shares and len(by_step.get(step, ())) >= max(1, shares[step] - backup):
            step += 1
        self.leases.restore(step, ())
        if step in shares:
            self.leases.cut(step, shares[step], by_step.get(step, set()))

    def _make_leases(self, setup: dict[str, Any]) -> None:
        scheduler, per_epoch = self._scheduler, int(setup["steps_per_epoch"])
        plan, policy = scheduler.config.plan, scheduler.config.policy
        steps = plan.epochs * per_epoch
        work = StepCount(min(steps, plan.max_steps or steps), per_epoch)
        if policy.shared:
            self.leases = SharedLeases(work, policy.backup)
        else:
            self.leases = FreeLeases(work, policy.bound)
        runs = setup["done_beyond"]
        beyond = [t for a, b in zip(runs[::2], runs[1::2], strict=True) for t in range(a, b + 1)]
        self.leases.restore(int(setup["done_below"]), beyond)
        scheduler.reviewing.begin_at(self.steps(), per_epoch)

    # The setup

    def set_up(self, info: dict[str, Any]) -> None:
        """The servers hold what they begin with."""
        if self.setup is not None:
            return
        scheduler, now_s = self._scheduler, time.monotonic()
        self.setup = info
        scheduler.journal.write("setup", info=info)
        scheduler.reviewing.set_up(info.get("best"), now_s)
        self._make_leases(info)
        assert self.leases is not None
        scheduler.bookkeeping.started(info)
        for member in scheduler.roster.members.of_role("worker"):
            self.leases.join(member.name, (), now_s)
        scheduler.reviewing.look(now_s)
        self.give_all(now_s)

    def set_up_again(self) -> bool:
        """A server lost what it began with; whether that can be undone: no gradient was given out yet."""
        if self.begun:
            return False
        self.setup, self.leases, self.setup_worker = None, None, ""
        return True

    # Tasks

    def give_all(self, now_s: float) -> None:
        """Give every worker that asks a task, where there is one."""
        for name in list(self.asking):
            member = self._scheduler.roster.members.get(name)
            if member is None:
                del self.asking[name]
                continue
            task = self._task_for(member, now_s)
            if task is not None:
                del self.asking[name]
                self._scheduler.reply(member.peer, Kind.TASK, {"info": task})

    def _task_for(self, member: RunMember, now_s: float) -> dict[str, Any] | None:
        scheduler = self._scheduler
        if self.setup is None:
            if self.setup_worker or not all(s.primary for s in scheduler.roster.serving.values()):
                return None
            if not member.is_home:
                return None
            self.setup_worker = member.name
            return {"task": SETUP_TASK, "kind": "setup"}
        if self.leases is None:
            return None
        review = scheduler.reviewing.task_for(member)
        if review is not None:
            self.leases.pause(member.name, True)
            return review
        if scheduler.stopping or not self._servers_ready():
            return None
        before = self.leases.shares if isinstance(self.leases, SharedLeases) else 0
        task = self.leases.take(member.name, now_s)
        if task is not None and before == 0 and isinstance(self.leases, SharedLeases):
            scheduler.journal.write("shares", step=task["step"], shares=task["shares"])
        return task

    def _servers_ready(self) -> bool:
        """Whether every server can take gradients; before the first of them, also whether every standby is there."""
        serving, replicas = self._scheduler.roster.serving.values(), self._scheduler.config.policy.standbys
        ready = all(s.ready for s in serving)
        if ready and not self.begun and (not replicas or all(s.standby_ready for s in serving)):
            self.begun = True
            self._scheduler.journal.write("begun")
        return ready and self.begun

    def done(self, member: RunMember, task: int, info: dict[str, Any], now_s: float) -> None:
        """Count a task that a worker reports."""
        if self.leases is None:
            return
        scheduler, shared = self._scheduler, isinstance(self.leases, SharedLeases)
        late = bool(info.get("late"))
        counted = self.leases.finish(task, member.name, now_s, late)
        if counted or (late and shared):
            scheduler.journal.write("done", task=task, worker=member.name, samples=int(info["samples"]), late=late)
        scheduler.bookkeeping.add(member.name, task // MAX_SHARES if shared else task, info, counted)

    # Deaths

    def worker_gone(self, name: str) -> int:
        """Take back what a worker has; returns how many tasks."""
        self.asking.pop(name, None)
        if self.setup_worker == name and self.setup is None:
            self.setup_worker = ""
        return len(self.leases.leave(name)) if self.leases is not None else 0

    def settled(self, info: dict[str, Any]) -> None:
        """A server came back and says what it has: what was done and is not there is lost, or done again."""
        held = _numbers(info["tasks"])
        if isinstance(self.leases, SharedLeases):
            again = self.leases.lost(held, int(info["watermark"]))
            if again:
                words = f"server{info['index']} lacks {len(again)} shares of the present step: they are done again"
                self._scheduler.record.write(SharesAgain(words, len(again)))
            self._scheduler.roster.catch_up(int(info["index"]), self.leases.done_steps)
        elif self.leases is not None:
            self._scheduler.roster.catch_up(int(info["index"]), 0)
            if info["life"] in self._settled:
                return
            self._settled.add(info["life"])
            done = set(range(int(info["watermark"]), self.leases.done_steps)) | self.leases.done_beyond
            lost = sorted(done - held)
            self.tell_lost(int(info["index"]), len(lost), lost[:100])

    def tell_lost(self, index: int, lost: int, tasks: list[int]) -> None:
        """Say in the record what a server's death cost."""
        words = f"{lost} updates are lost: nobody could push them again" if lost else "nothing is lost"
        self._scheduler.record.write(ServerSettled(f"server{index} is back; {words}", index, lost, tasks))


def _numbers(runs: list[int]) -> set[int]:
    """Read first, last, first, last, ..."""
    return {t for a, b in zip(runs[::2], runs[1::2], strict=True) for t in range(a, b + 1)}
