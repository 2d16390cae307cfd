"""What the coordinator wants done: its state decides, and the scheduler's shell does it, in order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from echelon.coordinator.journal import JournalEntry
from echelon.coordinator.messages import EvaluationDone, JoinWorker, SetupDone
from echelon.messages.framing import Content
from echelon.records.kinds import Record, Steps


@dataclass(frozen=True, slots=True)
class Send:
    """Send to a peer."""

    peer: bytes
    content: Content


@dataclass(frozen=True, slots=True)
class Save:
    """Write to the journal, before anything that follows is done."""

    entry: JournalEntry


@dataclass(frozen=True, slots=True)
class Tell:
    """Write a line of the run's record."""

    record: Record


@dataclass(frozen=True, slots=True)
class Began:
    """The run begins, with the workers that have joined in order of their numbers; not again after another setup."""

    setup: SetupDone
    workers: Sequence[JoinWorker] = ()


@dataclass(frozen=True, slots=True)
class WindowClosed:
    """A window of steps is full, or work ends; `resources` has a row by worker, empty where nothing new was sampled."""

    steps: Steps
    resources: list[list[float]]


@dataclass(frozen=True, slots=True)
class Evaluated:
    """A copy was evaluated, or only saved, after an epoch."""

    epoch: int
    result: EvaluationDone


Effect = Send | Save | Tell | Began | WindowClosed | Evaluated
