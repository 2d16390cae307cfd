"""Terms of a group whose survivors go on when one of them dies: who takes part, as the supervisor has decided.

A *term* is a list of member processes. The first one, 0, is all processes of a start, and nothing is written for it.
The one that starts and watches the processes writes each later term to a file of a folder that only this user can read;
the members look there. Nothing in it is a pickle.
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from echelon.core.files import write_atomic

TERMS_VARIABLE = "ECHELON_TERMS"
"""In the environment of a process whose group outlives deaths: the folder of its terms."""
MEMBER_VARIABLE = "ECHELON_MEMBER"
"""In the same environment: which member it is, as `member_name` says."""
TERMINAL_VARIABLE = "ECHELON_TERMINAL"
"""In the environment of a process whose output goes to a file: the descriptor of where it went before."""


@dataclass(frozen=True)
class Term:
    """Who takes part from now on.

    Attributes:
        number: rises.
        members: by rank.
        lost_by: the newest term, up to this one, that began because members of the one before were lost; 0: none. One
            that began for newcomers alone can wait for the end of the step under way.
    """

    number: int
    members: tuple[str, ...]
    lost_by: int = 0


def member_name(process: str, start: int) -> str:
    """Return the name of a process's start, from 0: one that was started again is another member.

    >>> member_name("rank1", 0)
    'rank1.0'
    """
    return f"{process}.{start}"


def is_newcomer(member: str) -> bool:
    """Whether a member was started beside a group that had begun before."""
    return not member.endswith(".0")


class TermFolder:
    """The folder of a group's terms: written by its supervisor, read by its members."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = path / "term.json"
        self._seen: tuple[int, int] | None = None
        self._last: Term | None = None

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
            self._seen, self._last = seen, Term(values["number"], tuple(values["members"]), values["lost_by"])
        return self._last

    def arrive(self, member: str) -> None:
        """Say that a newcomer is ready to take part."""
        (self.path / f"{member}.ready").touch()

    def has_arrived(self, member: str) -> bool:
        """Whether a newcomer has said so."""
        return (self.path / f"{member}.ready").exists()

    def begin(self, member: str) -> None:
        """Say that a member trains, and can go on without others from now on."""
        (self.path / f"{member}.begun").touch()

    def has_begun(self, member: str) -> bool:
        """Whether a member has said so."""
        return (self.path / f"{member}.begun").exists()

    def agree(self, member: str) -> None:
        """Say that a newcomer has what the others have trained."""
        (self.path / f"{member}.agreed").touch()

    def has_agreed(self, member: str) -> bool:
        """Whether a member has what is trained: a newcomer may have yet to get it from one that has."""
        return self.has_begun(member) if not is_newcomer(member) else (self.path / f"{member}.agreed").exists()

    def let_leave(self, member: str) -> None:
        """Ask a member to leave after the step under way."""
        (self.path / f"{member}.leave").touch()

    def may_leave(self, member: str) -> bool:
        """Whether a member was asked to."""
        return (self.path / f"{member}.leave").exists()

    def complain(self, term: int, member: str) -> None:
        """Say that a member of a term has lost the others, and does not know why."""
        (self.path / f"{term}-{member}.lost").touch()

    def has_complained(self, term: int, member: str) -> bool:
        """Whether a member has said so."""
        return (self.path / f"{term}-{member}.lost").exists()

    @contextmanager
    def door(self) -> Iterator[None]:
        """Take in newcomers, or close, one at a time: who closes knows of all that were taken in before."""
        with (self.path / "door").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def close(self, term: int | None) -> bool:
        """Say that the members have trained all there is: no newcomer is taken in any more.

        Args:
            term: that a member is in; where a newer one has begun, nothing is said. None: whatever has begun.

        Returns:
            Whether it was said.
        """
        with self.door():
            newest = self.newest()
            if term is not None and newest is not None and newest.number > term:
                return False
            (self.path / "closed").touch()
            return True

    @property
    def is_closed(self) -> bool:
        """Whether a member has said so."""
        return (self.path / "closed").exists()

    def enter(self, term: Term, member: str) -> None:
        """Say that a member has left the term before, and waits for the others of a new one."""
        self._entered(term, member).touch()

    def has_begun_term(self, term: Term) -> bool:
        """Whether a member has entered a term."""
        return any(self._entered(term, member).exists() for member in term.members)

    def missing(self, term: Term) -> list[str]:
        """Return the members of a term that have not entered it."""
        return [member for member in term.members if not self._entered(term, member).exists()]

    def _entered(self, term: Term, member: str) -> Path:
        return self.path / f"{term.number}-{member}.in"

    def store(self, term: Term) -> Path:
        """Return the file in which the members of a term find each other."""
        return self.path / f"store-{term.number}"
