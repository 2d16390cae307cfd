"""The folders of a group's terms on several machines are kept alike: each tells the first one what its members say.

Marks only become more, so it does not matter how often, or when, they are told. The first machine alone makes terms.
Who asks says how many marks it has been told, and which of its own were not among them; so nothing is acknowledged.
"""

from __future__ import annotations

from dataclasses import dataclass

from echelon.core.terms import Term, TermFolder

_MOST = 1000  # marks in a message


@dataclass(frozen=True)
class Marks:
    """What another machine tells the first one.

    Attributes:
        round: the number of the start that they are of; 0: none has begun.
        names: marks that the first one has not told it yet.
        heard: how many it has been told.
    """

    round: int = 0
    names: tuple[str, ...] = ()
    heard: int = 0


@dataclass(frozen=True)
class MarkNews:
    """What the first machine tells another one: marks from the number `since` on, and the newest term."""

    round: int = 0
    since: int = 0
    names: tuple[str, ...] = ()
    term: Term | None = None


class MarkLog:
    """The marks of all machines, on the first one, in the order in which they came there."""

    def __init__(self, folder: TermFolder, number: int) -> None:
        """Take the folder of a round, and the round's number."""
        self.folder, self.round = folder, number
        self._log: list[str] = []

    def answer(self, marks: Marks) -> MarkNews:
        """Take the marks of another machine, which tells again what cannot be written for now; returns what is news."""
        if marks.round != self.round:
            return MarkNews()
        with self.folder.patiently():
            self.folder.take(marks.names)
            self._log += sorted(self.folder.marks() - set(self._log))
        return MarkNews(
            self.round, marks.heard, tuple(self._log[marks.heard : marks.heard + _MOST]), self.folder.newest()
        )


class MarkCopy:
    """The marks and the newest term, on another machine than the first one."""

    def __init__(self, folder: TermFolder, number: int) -> None:
        """Take the folder of a round, and the round's number."""
        self.folder, self.round = folder, number
        self._told: set[str] = set()
        self._heard = self._stamp = 0

    def tell(self) -> Marks:
        """Return what the first machine is to be told."""
        return Marks(self.round, tuple(sorted(self.folder.marks() - self._told))[:_MOST], self._heard)

    def take(self, news: MarkNews) -> None:
        """Let this machine's members know what the first one tells; it tells again what cannot be written for now."""
        if news.round == self.round and news.since == self._heard:
            with self.folder.patiently():
                self._take(news)

    def _take(self, news: MarkNews) -> None:
        self.folder.take(news.names)
        self._told |= set(news.names)
        self._heard += len(news.names)
        newest = self.folder.newest()
        if news.term is not None and (newest is None or newest.number < news.term.number):
            self.folder.publish(news.term)

    def is_waited_for(self) -> bool:
        """Whether a member, or this machine, waits for what others say: the first machine is asked often then."""
        stamp = self.folder.stamp()
        if stamp and stamp == self._stamp:
            return False
        waits = self._waits()
        self._stamp = 0 if waits else stamp
        return waits

    def _waits(self) -> bool:
        folder, term = self.folder, self.folder.newest()
        number = term.number if term is not None else 0
        if not self.folder.marks() <= self._told or folder.complains(number):
            return True
        if folder.asks_to_close(number) and not folder.is_closed:
            return True
        return term is not None and bool(folder.missing(term))
