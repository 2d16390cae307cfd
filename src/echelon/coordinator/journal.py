"""The coordinator's journal: one JSON line per thing that must survive its death, appended with one write each.

It does not grow with the run: from time to time what it says is written anew, in few lines.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from echelon.coordinator.messages import SetupDone
from echelon.core.files import write_atomic
from echelon.core.lines import WaitingLines, append_line
from echelon.core.patience import Patience
from echelon.core.task import Stagnation
from echelon.messages.plain import AnyFloat, Malformed, from_plain, to_plain


@dataclass(frozen=True, slots=True)
class JournalEntry:
    """One line of the journal."""

    kind: ClassVar[str]


@dataclass(frozen=True, slots=True)
class SetUp(JournalEntry):
    """The servers hold what the run begins with."""

    kind: ClassVar[str] = "setup"
    setup: SetupDone


@dataclass(frozen=True, slots=True)
class Begun(JournalEntry):
    """A gradient may have been given out."""

    kind: ClassVar[str] = "begun"


@dataclass(frozen=True, slots=True)
class StepCut(JournalEntry):
    """A step was cut into shares."""

    kind: ClassVar[str] = "shares"
    step: int
    shares: int


@dataclass(frozen=True, slots=True)
class Counted(JournalEntry):
    """A task is done; `late`: its step was complete without it."""

    kind: ClassVar[str] = "done"
    task: int
    worker: str
    samples: int
    late: bool


@dataclass(frozen=True, slots=True)
class CountedBefore(JournalEntry):
    """What the entries before this one counted, in one: all steps before `below`, and tasks from there on.

    Attributes:
        done: the tasks, as first, last, first, last of their runs.
        shares: into how many shares the step `below` was cut; 0: not yet.
    """

    kind: ClassVar[str] = "counted"
    below: int
    done: list[int]
    shares: int


@dataclass(frozen=True, slots=True)
class EpochSeen(JournalEntry):
    """So many epochs are done, and what is due after them was asked for."""

    kind: ClassVar[str] = "epoch"
    epoch: int


@dataclass(frozen=True, slots=True)
class Best(JournalEntry):
    """The best result of an evaluation so far."""

    kind: ClassVar[str] = "best"
    best: AnyFloat
    loss: AnyFloat | None = None


@dataclass(frozen=True, slots=True)
class Stagnant(JournalEntry):
    """How many evaluations in a row gave no better result."""

    kind: ClassVar[str] = "stagnant"
    stagnation: Stagnation


@dataclass(frozen=True, slots=True)
class CheckpointSaved(JournalEntry):
    """A checkpoint of a step is on the disk."""

    kind: ClassVar[str] = "saved"
    step: int


@dataclass(frozen=True, slots=True)
class Ended(JournalEntry):
    """The run is over."""

    kind: ClassVar[str] = "ended"
    status: str


_KINDS = {
    entry.kind: entry
    for entry in (SetUp, Begun, StepCut, Counted, CountedBefore, EpochSeen, Best, Stagnant, CheckpointSaved, Ended)
}


class Journal:
    """Appends entries to a file; `read` returns those that earlier processes wrote.

    Attributes:
        lines: of the file.
    """

    def __init__(self, path: Path, patience: Patience) -> None:
        """Open the journal; entries that the disk does not take wait in memory, for as long as patience lasts."""
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = self._open()
        self._end_torn_line()
        with path.open("rb") as file:
            self.lines = sum(1 for _ in file)
        self._patience = patience
        self._waiting = WaitingLines(path.name, lambda line: append_line(self._fd, line), patience)

    def write(self, entry: JournalEntry) -> None:
        """Append one entry. It survives the death of this process when this returns, unless the disk fails.

        Raises:
            UserError: the disk has taken nothing for longer than patience lasts.
        """
        self._waiting.append(journal_line(entry))
        self.lines += 1

    def replace(self, entries: Sequence[JournalEntry]) -> None:
        """Let the file hold these entries alone; a crash leaves the old one or the new one, whole.

        Where the disk takes nothing now the file stays as it is.
        """
        if not self._waiting.waiting:
            self._patience.attempt("compacted journal", lambda: self._replace(entries))

    def _replace(self, entries: Sequence[JournalEntry]) -> None:
        write_atomic(self._path, b"".join(map(journal_line, entries)).decode())
        before, self._fd = self._fd, self._open()
        os.close(before)
        self.lines = len(entries)

    def read(self) -> Iterator[JournalEntry]:
        """Yield the whole entries, oldest first."""
        with self._path.open("rb") as file:
            for line in file:
                entry = read_entry(line)
                if entry is not None:
                    yield entry

    def close(self) -> None:
        """Write what waits, and close the file.

        Raises:
            UserError: the disk has taken nothing for longer than patience lasts.
        """
        try:
            self._waiting.flush()
        finally:
            os.close(self._fd)

    def _open(self) -> int:
        return os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)

    def _end_torn_line(self) -> None:
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")


def journal_line(entry: JournalEntry) -> bytes:
    """Write an entry as a line of a journal, with the present time."""
    return json.dumps({"t": round(time.time(), 6), "kind": entry.kind, **to_plain(entry)}).encode() + b"\n"


def read_entry(line: bytes) -> JournalEntry | None:
    """Read one line of a journal; None where it is not whole: the one on which its writer died."""
    try:
        fields = json.loads(line)
        fields.pop("t")
        return from_plain(_KINDS[fields.pop("kind")], fields)
    except (ValueError, KeyError, AttributeError, Malformed):
        return None
