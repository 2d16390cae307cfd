"""When copies of the parameters are evaluated and saved: the scheduler's side."""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

from echelon.sync.server.protocol import Kind
from echelon.sync.server.reviews import Review, Reviews
from echelon.sync.server.shares import SharedLeases

if TYPE_CHECKING:
    from echelon.sync.server.scheduler import Scheduler


class Reviewing:
    """What is due, what waits, and the best result so far."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.queue = Reviews(random.randrange(1, 2**30))
        self.final_asked = False
        self.epochs_seen = 0
        self.saved_step, self.saved_s = 0, time.monotonic()
        self.best: float | None = None
        self.lead = ""

    def look(self, now_s: float) -> None:
        """Ask for evaluations and checkpoints that are due."""
        assert self._scheduler.leases is not None and self._scheduler.setup is not None
        plan, per_epoch = self._scheduler.config.plan, int(self._scheduler.setup["steps_per_epoch"])
        epochs = self._scheduler.leases.done_steps // per_epoch
        steps = self._scheduler.steps()
        every = plan.save_steps
        due = (every is not None and steps // every > self.saved_step // every) or (
            plan.save_s is not None and now_s - self.saved_s >= plan.save_s
        )
        if self._scheduler.leases.complete:
            if not self.final_asked:
                self.final_asked = True
                self.ask(Review(max(0, epochs - 1), steps, True, "end"))
            return
        if epochs > self.epochs_seen:
            self.epochs_seen = epochs
            self._scheduler.journal.write("epoch", epoch=epochs)
            self._scheduler.roster.tell_members()  # with the new watermark
            if plan.eval_every and epochs % plan.eval_every == 0:
                self.ask(Review(epochs - 1, steps, True, "interval" if due else ""))
                return
        if due and self.queue.idle:
            self.ask(Review(epochs, steps, False, "interval"))

    def ask(self, review: Review) -> None:
        if review.reason:
            self.saved_step, self.saved_s = review.step, time.monotonic()
        self.queue.ask(review)
        if isinstance(self._scheduler.leases, SharedLeases):
            self._scheduler.leases.held_back = True
        self.advance()

    def advance(self) -> None:
        boundary = not isinstance(self._scheduler.leases, SharedLeases) or self._scheduler.leases.at_boundary
        if self.queue.waiting and boundary and all(s.ready for s in self._scheduler.roster.serving.values()):
            self.begin(self.queue.begin(set(self._scheduler.roster.serving)))

    def begin(self, review: Review) -> None:
        for index in self._scheduler.roster.serving:
            server = self._scheduler.roster.members.get(self._scheduler.roster.serving[index].primary)
            if server is not None and self._scheduler.roster.serving[index].ready:
                self._scheduler.reply(server.peer, Kind.TAG, {"tag": review.tag, "full": review.full})

    def tagged(self, tag: int, index: int) -> None:
        review = self.queue.present
        if review is None or review.tag != tag:
            return
        review.missing.discard(index)
        if review.copied:
            if isinstance(self._scheduler.leases, SharedLeases):
                self._scheduler.leases.held_back = False
            self._scheduler.give_all(time.monotonic())
