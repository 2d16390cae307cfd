"""Who takes part in a group whose survivors go on: its terms, as its supervisor decides them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

from echelon.core.address import STORE_VARIABLE
from echelon.core.terms import MEMBER_VARIABLE, TERMS_VARIABLE, Term, TermFolder, member_name
from echelon.launch.rounds import Round


class GroupMembers:
    """The members of one start of a group, and the processes that were started beside them and are not members yet.

    Members keep their order, which is that of their ranks; newcomers come last. So the one that leads stays, until it
    dies.

    Attributes:
        names: of the processes that a start of the whole group has.
        closing: members have begun to end; nobody is waited for that has yet to come.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.names, self.closing = names, False
        self._folder: TermFolder | None = None
        self._term, self._lost_by = 0, 0
        self._starts: dict[str, int] = {}
        self._inside: list[str] = []
        self._booting: list[str] = []
        self._leaving: set[str] = set()

    def begin(self, round_: Round) -> None:
        """Begin a start of the whole group."""
        kind, _, where = round_.environment.get(STORE_VARIABLE, "").partition(":")
        self._folder = TermFolder(Path(f"{where}.terms")) if kind == "file" else None
        if self._folder is not None:
            self._folder.path.mkdir()
        self._term, self._lost_by, self.closing, self._starts = 0, 0, False, dict.fromkeys(self.names, 0)
        self._inside, self._booting, self._leaving = list(self.names), [], set()

    def environment(self, name: str) -> dict[str, str]:
        """Return what a process is to know of its group's terms."""
        if self._folder is None:
            return {}
        return {TERMS_VARIABLE: str(self._folder.path), MEMBER_VARIABLE: self._member(name)}

    def _member(self, name: str) -> str:
        return member_name(name, self._starts[name])

    def survivors(self, dead: Collection[str]) -> list[str]:
        """Return the members that are left without some.

        None where they cannot go on: one of them has not begun, or all of them have yet to get what is trained.
        """
        left, folder = [name for name in self._inside if name not in dead], self._folder
        members = [self._member(name) for name in left]
        if folder is None or not all(map(folder.has_begun, members)) or not any(map(folder.has_agreed, members)):
            return []
        return left

    def lose(self, dead: Collection[str]) -> None:
        """Let the survivors go on without some members."""
        self._inside = self.survivors(dead)
        self._lost_by = self._term + 1
        self._publish()

    def drain(self, names: Collection[str]) -> str:
        """Ask members to leave after the step under way; returns why they cannot, or nothing."""
        stay = [name for name in self._inside if name not in {*names, *self._leaving}]
        folder = self._folder
        if not names or any(name not in self._inside for name in names):
            return "the run has no such member now"
        if not stay:
            return "nobody would be left to train"
        if folder is None or len(self.survivors(names)) < len(self._inside) - len(names):
            return "a member has yet to begin"
        self._leaving |= set(names)
        for name in names:
            folder.let_leave(self._member(name))
        return ""

    def release(self, name: str) -> bool:
        """Let a process go for good that was asked to leave; returns whether it was."""
        asked = name in self._leaving
        if asked:
            self._leaving.discard(name)
        return asked

    def forget(self, name: str) -> None:
        """Note that a process that was on its way is gone."""
        self._booting = [each for each in self._booting if each != name]

    def start_again(self, name: str) -> dict[str, str]:
        """Let a process come beside the members; returns what it is to know."""
        self._starts[name] = self._starts.get(name, 0) + 1
        self._booting.append(name)
        return self.environment(name)

    def admit(self) -> list[str]:
        """Take in the newcomers that are ready; returns them."""
        folder = self._folder
        if not self._booting or folder is None or self.closing or folder.is_closed:
            return []
        ready = [name for name in self._booting if folder.has_arrived(self._member(name))]
        if not ready:
            return []
        with folder.door():
            if folder.is_closed:
                return []
            self._booting = [name for name in self._booting if name not in ready]
            self._inside += ready
            self._publish()
        return ready

    def suspects(self) -> list[str]:
        """Return the members that have not lost the others, where some have and nobody died: one of these is to blame.

        None where nobody complains.
        """
        folder, term = self._folder, self._term
        lost = [name for name in self._inside if folder is not None and folder.has_complained(term, self._member(name))]
        return [name for name in self._inside if name not in lost] if lost else []

    def booting(self) -> list[str]:
        """Return the processes that are on their way."""
        return list(self._booting)

    def _publish(self) -> None:
        assert self._folder is not None
        self._term += 1
        self._folder.publish(Term(self._term, tuple(map(self._member, self._inside)), self._lost_by))
