"""When copies of the parameters are evaluated and saved: the scheduler's side."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING, Any

from echelon.coordinator.members import RunMember
from echelon.coordinator.reviews import REVIEW_BASE, EvaluationTask, Reviews
from echelon.coordinator.shares import SharedLeases
from echelon.messages.protocol import Kind

if TYPE_CHECKING:
    from echelon.coordinator.scheduler import Scheduler


class Reviewing:
    """What is due, what waits, and the best result so far."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.queue = Reviews(random.randrange(1, 2**30))
        self._final_asked = False
        self._epochs_seen = 0
        self._saved_step, self._saved_s = 0, time.monotonic()
        self._best: float | None = None
        self._lead = ""

    def restore(self, entry: dict[str, Any]) -> None:
        """Take up a line of the journal."""
        match entry["kind"]:
            case "epoch":
                self._epochs_seen = entry["epoch"]
            case "best":
                self._best = entry["best"]
            case "saved":
                self._saved_step = entry["step"]

    def set_up(self, best: float | None, now_s: float) -> None:
        """Begin with the best result of the checkpoint that the run resumes; time counts from now."""
        self._best, self._saved_s = best, now_s

    def begin_at(self, steps: int, per_epoch: int) -> None:
        """Begin at a step: what lies before it was evaluated and saved."""
        self._epochs_seen = max(self._epochs_seen, steps // per_epoch)
        self._saved_step = max(self._saved_step, steps)

    def turn(self, now_s: float) -> None:
        """Ask for what is due, also early where the run is to stop; go on with what waits."""
        if self._scheduler.stopping and not self._final_asked:
            self._final_asked = True
            self._stop_early()
        self.look(now_s)
        self.advance()

    def _stop_early(self) -> None:
        assignment = self._scheduler.assignment
        assert assignment.leases is not None and assignment.setup is not None
        if isinstance(assignment.leases, SharedLeases) and not assignment.leases.at_boundary:
            # The half-done step is not in the checkpoint; it is trained again after a resume.
            assignment.leases.restore(assignment.leases.done_steps, ())
        epoch = assignment.steps() // int(assignment.setup["steps_per_epoch"])
        self.queue.ask(EvaluationTask(epoch, assignment.steps(), False, "stop"))

    def look(self, now_s: float) -> None:
        """Ask for evaluations and checkpoints that are due."""
        assignment, plan = self._scheduler.assignment, self._scheduler.config.plan
        assert assignment.leases is not None and assignment.setup is not None
        if self._final_asked:
            return
        epochs, steps = assignment.leases.done_steps // int(assignment.setup["steps_per_epoch"]), assignment.steps()
        every = plan.save_steps
        due = (every is not None and steps // every > self._saved_step // every) or (
            plan.save_s is not None and now_s - self._saved_s >= plan.save_s
        )
        if assignment.leases.complete:
            self._final_asked = True
            self._ask(EvaluationTask(max(0, epochs - 1), steps, True, "end"))
            return
        if epochs > self._epochs_seen:
            self._epochs_seen = epochs
            self._scheduler.journal.write("epoch", epoch=epochs)
            self._scheduler.roster.tell_members()  # with the new watermark
            if plan.eval_every and epochs % plan.eval_every == 0:
                self._ask(EvaluationTask(epochs - 1, steps, True, "interval" if due else ""))
                return
        if due and self.queue.idle:
            self._ask(EvaluationTask(epochs, steps, False, "interval"))

    def _ask(self, review: EvaluationTask) -> None:
        if review.reason:
            self._saved_step, self._saved_s = review.step, time.monotonic()
        self.queue.ask(review)
        leases = self._scheduler.assignment.leases
        if isinstance(leases, SharedLeases):
            leases.held_back = True
        self.advance()

    def advance(self) -> None:
        """Begin what waits, once every server can keep a copy."""
        leases, serving = self._scheduler.assignment.leases, self._scheduler.roster.serving
        boundary = not isinstance(leases, SharedLeases) or leases.at_boundary
        if self.queue.waiting and boundary and all(s.ready for s in serving.values()):
            self._begin(self.queue.begin(set(serving)))

    def again(self) -> None:
        """A copy was lost with its server: keep new ones."""
        if self.queue.present is not None:
            self._drop_copies(self.queue.present.tag)
            self._begin(self.queue.again(set(self._scheduler.roster.serving)))

    def _drop_copies(self, tag: int) -> None:
        for server in self._scheduler.roster.members.of_role("server"):
            self._scheduler.reply(server.peer, Kind.UNTAG, {"tag": tag})

    def _begin(self, review: EvaluationTask) -> None:
        for index in self._scheduler.roster.serving:
            self.tell_server(index, review)

    def tell_server(self, index: int, review: EvaluationTask | None = None) -> None:
        """Let a server keep its copy for the present review, where it owes one and can."""
        scheduler, present = self._scheduler, review or self.queue.present
        serving = scheduler.roster.serving[index]
        server = scheduler.roster.members.get(serving.primary)
        if present is not None and index in present.missing and server is not None and serving.ready:
            scheduler.reply(server.peer, Kind.TAG, {"tag": present.tag, "full": present.full})

    def tagged(self, tag: int, index: int) -> None:
        """A server has kept its copy."""
        review = self.queue.present
        if review is None or review.tag != tag:
            return
        review.missing.discard(index)
        if review.copied:
            leases = self._scheduler.assignment.leases
            if isinstance(leases, SharedLeases):
                leases.held_back = False
            self._scheduler.assignment.give_all(time.monotonic())

    def task_for(self, member: RunMember) -> dict[str, Any] | None:
        """Return the present review as a task, when it waits for this worker."""
        review = self.queue.present
        if review is None or not review.copied or review.worker or not self._leads(member):
            return None
        review.worker, review.best, self._lead = member.name, self._best, member.name
        return review.as_task()

    def _leads(self, member: RunMember) -> bool:
        """Whether a worker is the one that evaluates: the one that did so last, else the first of the first machine."""
        workers = self._scheduler.roster.members.of_role("worker")
        names = [m.name for m in workers if m.is_home] or [m.name for m in workers]
        return member.name == (self._lead if self._lead in names else names[0])

    def worker_gone(self, name: str) -> None:
        """Another worker takes the review that one had."""
        if self.queue.present is not None and self.queue.present.worker == name:
            self.queue.present.worker = ""

    def result(self, member: RunMember, task: int, info: dict[str, Any]) -> None:
        """Take what a review gave."""
        scheduler, review = self._scheduler, self.queue.present
        if scheduler.assignment.leases is not None:
            scheduler.assignment.leases.pause(member.name, False)
        if review is None or task != REVIEW_BASE + review.tag:
            return
        if info.get("lost"):
            self.again()
            return
        self._drop_copies(review.tag)
        self.queue.end()
        if "best" in info:
            self._best = float(info["best"])
            scheduler.journal.write("best", best=self._best)
        scheduler.callbacks.reviewed(review.epoch, info)
        if review.reason:
            scheduler.journal.write("saved", step=review.step)
        if review.reason in ("end", "stop"):
            scheduler.end("completed" if review.reason == "end" else "stopped")
        self.advance()
        scheduler.assignment.give_all(time.monotonic())
