"""Who takes part in a group whose survivors go on: the first machine makes its terms from what is said."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from echelon.core.terms import Term, TermFolder, is_elsewhere


class TermKeeper:
    """The terms of one start of a group.

    Members keep their order, which is that of their ranks; newcomers come after the others of the first machine, or
    last. So the one that leads, which keeps the run's record, stays until it dies, and the next one is on the same
    machine: where that has none left, the others wait for a newcomer there.

    Attributes:
        members: of the newest term, or of the next one while they wait.
    """

    def __init__(self, folder: TermFolder, members: Sequence[str]) -> None:
        """Begin with the members of a start, by rank."""
        self._folder, self.members = folder, list(members)
        self._term, self._lost_by, self._stamp, self._stuck = 0, 0, 0, False

    def survivors(self, lost: Collection[str]) -> list[str]:
        """Return the members that are left without some.

        None where they cannot go on: one of them has not begun or is done, or all of them have yet to get what is
        trained.
        """
        left, folder = [member for member in self.members if member not in lost], self._folder
        can = all(folder.has_begun(member) and not folder.has_finished(member) for member in left)
        return left if can and any(map(folder.has_agreed, left)) else []

    @property
    def wait_for_first(self) -> bool:
        """Whether members wait for a newcomer of the first machine."""
        return all(map(is_elsewhere, self.members))

    def look(self, admits: bool) -> bool:
        """Make the terms that follow from what was said; returns whether a machine is lost that the others need.

        Args:
            admits: newcomers are taken in.
        """
        folder, stamp = self._folder, self._folder.stamp()
        if stamp and stamp == self._stamp:
            return self._stuck
        self._stamp = stamp
        lost = [member for member in self.members if folder.is_lost(member)]
        if lost and not all(map(folder.is_missed, lost)):
            if left := self.survivors(lost):
                self.members, self._lost_by = left, self._term + 1
                if not self.wait_for_first:
                    self._publish()
            else:
                for member in lost:
                    folder.miss(member)
        if folder.asks_to_close(self._term) and not folder.is_closed:
            folder.close(None)
        if admits and not folder.is_closed:
            self._admit()
        self._stuck = any(folder.is_missed(member) and folder.is_gone(member) for member in self.members)
        return self._stuck

    def _admit(self) -> None:
        """Take in the newcomers that are ready."""
        folder = self._folder
        arrived = [member for member in folder.arrived() if member not in self.members and not folder.is_lost(member)]
        if not arrived or (self.wait_for_first and all(map(is_elsewhere, arrived))):
            return
        with folder.door():
            if not folder.is_closed:
                self.members = sorted([*self.members, *arrived], key=is_elsewhere)
                self._publish()

    def _publish(self) -> None:
        self._term += 1
        self._folder.publish(Term(self._term, tuple(self.members), self._lost_by))
