"""Copies of the parameters that are evaluated or saved while training goes on.

A review goes: every server keeps a copy of now (TAG, TAGGED) -> a worker reads the copies, evaluates, writes the
checkpoint (a task) -> the copies are dropped. One review at a time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

REVIEW_BASE = 2**40
"""Review tasks are numbered from here, apart from batches."""


@dataclass
class EvaluationTask:
    """What is to be done with a copy: evaluate it, save it (and why), at which epoch and step."""

    epoch: int
    step: int
    evaluate: bool
    reason: str
    tag: int = 0
    missing: set[int] = field(default_factory=set)
    worker: str = ""
    best: float | None = None

    @property
    def full(self) -> bool:
        """Whether the optimizer's state is needed too."""
        return True  # the best checkpoint is whole, and whether this is the best only the evaluation tells

    @property
    def copied(self) -> bool:
        """Whether every server has kept its copy."""
        return self.tag > 0 and not self.missing

    def as_task(self) -> dict[str, Any]:
        """Describe the task for a worker."""
        return {"task": REVIEW_BASE + self.tag, "kind": "review", "tag": self.tag, "epoch": self.epoch,
                "step": self.step, "evaluate": self.evaluate, "reason": self.reason, "best": self.best}  # fmt: skip


class Reviews:
    """The review that is going on and those that wait. Tags begin at a number that no former life used."""

    def __init__(self, first_tag: int) -> None:
        self._tag = first_tag
        self.present: EvaluationTask | None = None
        self._waiting: deque[EvaluationTask] = deque()

    def ask(self, review: EvaluationTask) -> None:
        """Let a review wait for its turn."""
        self._waiting.append(review)

    @property
    def idle(self) -> bool:
        """Whether none goes on and none waits."""
        return self.present is None and not self._waiting

    @property
    def waiting(self) -> bool:
        """Whether one wants to begin."""
        return self.present is None and bool(self._waiting)

    def begin(self, servers: set[int]) -> EvaluationTask:
        """Begin the next review: returns it with its tag."""
        self.present = self._waiting.popleft()
        return self.again(servers)

    def again(self, servers: set[int]) -> EvaluationTask:
        """Begin the present review anew: a copy was lost with its server."""
        assert self.present is not None
        self._tag += 1
        self.present.tag, self.present.missing, self.present.worker = self._tag, set(servers), ""
        return self.present

    def end(self) -> None:
        """The present review is done."""
        self.present = None
