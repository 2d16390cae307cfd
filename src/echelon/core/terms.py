"""Terms of a group whose survivors go on when one of them dies: who takes part, as the supervisor has decided.

A *term* is a list of member processes. The first one, 0, is all processes of a start, and nothing is written for it.
The one that starts and watches the processes writes each later term to a file of a folder that only this user can read;
the members look there. What they say are *marks*: empty files, which stay. So the folders of several machines are kept
alike by giving each the marks of the others (`launch/term_marks.py`). Nothing in them is a pickle.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from echelon.core.files import write_atomic
from echelon.core.patience import may_pass

TERMS_VARIABLE = "ECHELON_TERMS"
"""In the environment of a process whose group outlives deaths: the folder of its terms."""
MEMBER_VARIABLE = "ECHELON_MEMBER"
"""In the same environment: which member it is, as `member_name` says."""
TERMINAL_VARIABLE = "ECHELON_TERMINAL"
"""In the environment of a process whose output goes to a file: the descriptor of where it went before."""


_SHARED = "shared"  # a file of the folder of one machine of several
_CLOSED = "run.closed"
_STOPPING = "run.stopping"
_COARSE_NS = 100_000_000
_MARK = re.compile(r"[\w.-]{1,80}\.(ready|begun|agreed|leave|lost|in|dead|missed|done|gone|closing|closed|stopping)")


@dataclass(frozen=True)
class Term:
    """Who takes part from now on.

    Attributes:
        number: rises.
        members: by rank.
        lost_by: the newest term, up to this one, that began because members of the one before were lost; 0: none. One
            that began for newcomers alone can wait for the end of the step under way.
        store: where its members meet, among machines of which several may lead; empty: where those of the start did.
    """

    number: int
    members: tuple[str, ...]
    lost_by: int = 0
    store: str = ""


def member_name(process: str, start: int) -> str:
    """Return the name of a process's start, from 0: one that was started again is another member.

    >>> member_name("rank1", 0)
    'rank1.0'
    """
    return f"{process}.{start}"


def machine_prefix(machine: int, beside: int) -> str:
    """Return what the names of a machine's members begin with; nothing on the first one.

    Args:
        machine: its number.
        beside: how many machines had come beside a group that had begun before, with this one; 0: it began with it.

    >>> machine_prefix(2, 0), machine_prefix(2, 1), machine_prefix(0, 0), machine_prefix(0, 2)
    ('machine2-', 'machine2b1-', '', 'machine0b2-')
    """
    return f"machine{machine}{f'b{beside}' if beside else ''}-" if machine or beside else ""


def is_elsewhere(member: str) -> bool:
    """Whether a member is on another machine than the first one.

    >>> is_elsewhere("machine1-rank0.0"), is_elsewhere("rank1.0")
    (True, False)
    """
    return member.startswith("machine")


def machine_of(member: str) -> str:
    """Return what the names of the members of a member's machine begin with.

    >>> machine_of("machine1-rank0.0"), machine_of("rank1.0")
    ('machine1-', '')
    """
    return f"{member.partition('-')[0]}-" if is_elsewhere(member) else ""


def is_newcomer(member: str) -> bool:
    """Whether a member was started beside a group that had begun before."""
    return not member.endswith(".0")


class TermFolder:
    """The folder of a group's terms: written by its supervisor, read by its members."""

    def __init__(self, path: Path) -> None:
        self.path, self._name = path, str(path)
        self._file = path / "term.json"
        self._seen: tuple[int, int] | None = None
        self._last: Term | None = None
        self._has_failed = False

    def make(self, shared: bool = False) -> None:
        """Make the folder; `shared`: those of other machines are kept alike."""
        self.path.mkdir()
        if shared:
            (self.path / _SHARED).touch()

    @contextmanager
    def patiently(self) -> Iterator[None]:
        """Let what cannot be written for now be: who calls tries it again. That it fails is told once."""
        try:
            yield
        except OSError as error:
            if not may_pass(error):
                raise
            if not self._has_failed:
                words = "%s cannot be written: %s; the members hear who takes part once it can be (TMPDIR says where)"
                logging.getLogger(__name__).warning(words, self.path, error.strerror or error)
            self._has_failed = True

    @property
    def is_shared(self) -> bool:
        """Whether it is kept like those of other machines."""
        return self._was_said(_SHARED)

    def publish(self, term: Term) -> None:
        """Let the members know a new term."""
        write_atomic(self._file, json.dumps(asdict(term)))

    def newest(self) -> Term | None:
        """Return the newest term; None while the first one, which nobody writes, goes on."""
        try:
            status = self._file.stat()
        except FileNotFoundError:
            return None
        seen = status.st_ino, status.st_mtime_ns
        if seen != self._seen:
            values = json.loads(self._file.read_text())
            self._seen, self._last = seen, Term(
                values["number"], tuple(values["members"]), values["lost_by"], values["store"]
            )  # fmt: skip
        return self._last

    def stamp(self) -> int:
        """Return a number that changes with what is said; 0 shortly after a change: the clocks of files are coarse."""
        changed = os.stat(self._name).st_mtime_ns  # noqa: PTH116 - each process asks again and again
        return changed if time.time_ns() - changed > _COARSE_NS else 0

    def marks(self) -> set[str]:
        """Return all that was said."""
        return {path.name for path in self.path.iterdir() if _MARK.fullmatch(path.name)}

    def take(self, marks: Iterable[str]) -> None:
        """Say what was said on another machine.

        Raises:
            ValueError: one of them is no mark.
        """
        for mark in marks:
            if not _MARK.fullmatch(mark):
                raise ValueError(f"{mark!r} is no mark of a member")
            (self.path / mark).touch()

    def _say(self, mark: str) -> None:
        (self.path / mark).touch()

    def _was_said(self, mark: str) -> bool:
        return (self.path / mark).exists()

    def arrive(self, member: str) -> None:
        """Say that a newcomer is ready to take part."""
        self._say(f"{member}.ready")

    def has_arrived(self, member: str) -> bool:
        """Whether a newcomer has said so."""
        return self._was_said(f"{member}.ready")

    def arrived(self) -> list[str]:
        """Return all newcomers that have said so, by name."""
        return sorted(mark.removesuffix(".ready") for mark in self.marks() if mark.endswith(".ready"))

    def begin(self, member: str) -> None:
        """Say that a member trains, and can go on without others from now on."""
        self._say(f"{member}.begun")

    def has_begun(self, member: str) -> bool:
        """Whether a member has said so."""
        return self._was_said(f"{member}.begun")

    def agree(self, member: str) -> None:
        """Say that a newcomer has what the others have trained."""
        self._say(f"{member}.agreed")

    def has_agreed(self, member: str) -> bool:
        """Whether a member has what is trained: a newcomer may have yet to get it from one that has."""
        return self.has_begun(member) if not is_newcomer(member) else self._was_said(f"{member}.agreed")

    def let_leave(self, member: str) -> None:
        """Ask a member to leave after the step under way."""
        self._say(f"{member}.leave")

    def may_leave(self, member: str) -> bool:
        """Whether a member was asked to."""
        return self._was_said(f"{member}.leave")

    def machine_may_leave(self, prefix: str) -> bool:
        """Whether members of a machine were asked to; `prefix`: what their names begin with."""
        return any(mark.startswith(prefix) and mark.endswith(".leave") for mark in self.marks())

    def stop(self) -> None:
        """Say that the whole run is being stopped."""
        self._say(_STOPPING)

    @property
    def is_stopping(self) -> bool:
        """Whether it is."""
        return self._was_said(_STOPPING)

    def lose(self, member: str) -> None:
        """Say that a member's process has ended before all was trained."""
        self._say(f"{member}.dead")

    def lose_machine(self, prefix: str) -> None:
        """Say that a machine with all its members is lost; `prefix`: what their names begin with."""
        self._say(f"{prefix}all.gone")

    def is_gone(self, member: str) -> bool:
        """Whether a member's machine is lost."""
        return self._was_said(f"{machine_of(member)}all.gone")

    def is_lost(self, member: str) -> bool:
        """Whether a member has ended, or its machine is lost."""
        return self._was_said(f"{member}.dead") or self.is_gone(member)

    def miss(self, member: str) -> None:
        """Say that the others cannot go on without a member that is lost."""
        self._say(f"{member}.missed")

    def is_missed(self, member: str) -> bool:
        """Whether they cannot."""
        return self._was_said(f"{member}.missed")

    def finish(self, member: str) -> None:
        """Say that a member's process is done."""
        self._say(f"{member}.done")

    def has_finished(self, member: str) -> bool:
        """Whether a member's process is done."""
        return self._was_said(f"{member}.done")

    def complain(self, term: int, member: str) -> None:
        """Say that a member of a term has lost the others, and does not know why."""
        self._say(f"{term}-{member}.lost")

    def has_complained(self, term: int, member: str) -> bool:
        """Whether a member has said so."""
        return self._was_said(f"{term}-{member}.lost")

    def complains(self, term: int) -> bool:
        """Whether any member of a term has said so."""
        return any(mark.startswith(f"{term}-") and mark.endswith(".lost") for mark in self.marks())

    @contextmanager
    def door(self) -> Iterator[None]:
        """Take in newcomers, or close, one at a time: who closes knows of all that were taken in before."""
        with (self.path / "door").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def close(self, term: int | None) -> bool | None:
        """Say that the members have trained all there is: no newcomer is taken in any more.

        Args:
            term: that a member is in; where a newer one has begun, nothing is said. None: whatever has begun.

        Returns:
            Whether it was said. None: the first of several machines has been asked; ask again.
        """
        with self.door():
            newest = self.newest()
            if term is not None and newest is not None and newest.number > term:
                return False
            if term is not None and not self.is_closed and self.is_shared:
                self._say(f"{term}-members.closing")
                return None
            self._say(_CLOSED)
            return True

    def asks_to_close(self, term: int) -> bool:
        """Whether a member of a term has asked the first machine to close."""
        return self._was_said(f"{term}-members.closing")

    @property
    def is_closed(self) -> bool:
        """Whether a member has said so."""
        return self._was_said(_CLOSED)

    def enter(self, term: Term, member: str) -> None:
        """Say that a member has left the term before, and waits for the others of a new one."""
        self._say(_entered(term, member))

    def has_begun_term(self, term: Term) -> bool:
        """Whether a member has entered a term."""
        return any(self._was_said(_entered(term, member)) for member in term.members)

    def missing(self, term: Term) -> list[str]:
        """Return the members of a term that have not entered it."""
        return [member for member in term.members if not self._was_said(_entered(term, member))]

    def store(self, term: Term) -> Path:
        """Return the file in which the members of a term find each other, where they are on one machine."""
        return self.path / f"store-{term.number}"


def _entered(term: Term, member: str) -> str:
    return f"{term.number}-{member}.in"
