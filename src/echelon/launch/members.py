"""Who takes part in a group whose survivors go on: the machine that leads, which is the first one unless others may,
makes its terms, and each knows its processes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from functools import partial

from echelon.core.terms import (
    MEMBER_VARIABLE,
    TERMS_VARIABLE,
    Term,
    TermFolder,
    machine_of,
    machine_prefix,
    member_name,
)
from echelon.launch.rounds import Round, TermLead

_AT_ONCE = TermLead()


class TermKeeper:
    """The terms of one start of a group.

    Members keep their order, which is that of their ranks; newcomers come after the others of this machine, or last.
    So the one that leads, which keeps the run's record, stays until it dies, and the next one is on the same machine:
    where that has none left, the others wait for a newcomer there.

    Attributes:
        members: of the newest term, or of the next one while they wait.
    """

    def __init__(
        self,
        folder: TermFolder,
        members: Sequence[str],
        prefix: str = "",
        lead: TermLead | None = None,
        go_on: bool = True,
    ) -> None:
        """Begin with the members of a start, by rank, or of the newest term that another machine made.

        Args:
            prefix: what the names of this machine's members begin with.
            lead: see there; left out, terms count at once.
            go_on: else the survivors of a death save what they have.
        """
        self._folder, self._prefix, self._go_on = folder, prefix, go_on
        self.lead = lead or TermLead()
        self.members = sorted(members, key=self.is_elsewhere)
        self._term, self._lost_by, self._stamp, self._stuck = self.lead.after, 0, 0, False
        self._held = self._was_cut_short = False
        self._unwritten: Callable[[], None] | None = None

    def is_elsewhere(self, member: str) -> bool:
        """Whether a member is on another machine than this one."""
        return machine_of(member) != self._prefix

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
        """Whether members wait for a newcomer of this machine."""
        return self._go_on and all(map(self.is_elsewhere, self.members))

    def look(self, admits: bool) -> bool:
        """Make the terms that follow from what was said; returns whether a machine is lost that the others need.

        What cannot be written for now follows at the next look.

        Args:
            admits: newcomers are taken in.
        """
        self._was_cut_short = True
        with self._folder.patiently():
            self._write()
            self._look(admits)
            self._was_cut_short = False
        return self._stuck

    @property
    def owes_term(self) -> bool:
        """Whether the members have yet to hear of what the last look found, which could not be written."""
        return self._was_cut_short or self._unwritten is not None

    def _look(self, admits: bool) -> None:
        folder, stamp = self._folder, self._folder.stamp()
        if self.lead.holds != self._held:
            self._hold(self.lead.holds)
        if self._held or (stamp and stamp == self._stamp):
            return
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
        self._stamp = stamp

    def _admit(self) -> None:
        """Take in the newcomers that are ready."""
        folder = self._folder
        arrived = [member for member in folder.arrived() if member not in self.members and not folder.is_lost(member)]
        if not arrived or (self.wait_for_first and all(map(self.is_elsewhere, arrived))):
            return
        with folder.door():
            if not folder.is_closed:
                self.members = sorted([*self.members, *arrived], key=self.is_elsewhere)
                self._publish()

    def _hold(self, holds: bool) -> None:
        """Let members here wait, in a term that has none and that other machines are not told of; or let them go on."""
        self._held, self._lost_by = holds, self._term + 1
        if holds:
            self._term += 1
            self._write(partial(self._folder.publish, Term(self._term, (), self._lost_by)))
        elif not self.wait_for_first:
            self._publish()

    def _publish(self) -> None:
        self._term += 1
        term = Term(self._term, tuple(self.members), self._lost_by, self.lead.store)
        self._write(partial(self.lead.publish or self._folder.publish, term))

    def _write(self, write: Callable[[], None] | None = None) -> None:
        """Write a term, or the one that could not be."""
        self._unwritten = write or self._unwritten
        if self._unwritten is not None:
            self._unwritten()
            self._unwritten = None


class GroupMembers:
    """The members of one start of a group on this machine, and the processes that were started beside them.

    Attributes:
        names: of the processes that a start of the whole group has.
        closing: members have begun to end; nobody is waited for that has yet to come.
        is_broken: another machine is lost, and the others cannot go on without it.
    """

    def __init__(self, names: Sequence[str], go_on: bool = True) -> None:
        """Take the processes; `go_on`: else the survivors of a death save what they have, and end."""
        self.names, self.closing, self.is_broken, self._go_on = names, False, False, go_on
        self._folder: TermFolder | None = None
        self._keeper: TermKeeper | None = None
        self._prefix = ""
        self._starts: dict[str, int] = {}
        self._booting: list[str] = []
        self._begun_with: list[str] = []
        self._ranks: dict[str, int] = {}  # of members, in the newest term that had them

    def begin(self, round_: Round, folder: TermFolder | None, lead: TermLead | None = _AT_ONCE) -> None:
        """Begin a start of the whole group, or of this machine beside the others.

        Args:
            folder: of the terms; None: survivors do not go on.
            lead: with what this machine makes the terms; None: another one does.
        """
        self._folder, self._prefix = folder, machine_prefix(round_.machine, round_.beside)
        self.closing = self.is_broken = False
        self._starts = dict.fromkeys(self.names, 1 if round_.beside else 0)
        self._booting = list(self.names) if round_.beside else []
        self._keeper, self._ranks = None, {}
        self._begun_with = [*map(self._member, self.names), *round_.others]
        self.take_lead(lead)

    def take_lead(self, lead: TermLead | None) -> None:
        """Make the terms from now on, or go on to, as another machine has done before; None: make none any more."""
        if lead is None or self._folder is None:
            self._keeper = None
        elif self._keeper is None:
            members = lead.members or self._begun_with
            self._keeper = TermKeeper(self._folder, members, self._prefix, lead, self._go_on)
        else:
            self._keeper.lead = lead

    def environment(self, name: str) -> dict[str, str]:
        """Return what a process is to know of its group's terms."""
        if self._folder is None:
            return {}
        return {TERMS_VARIABLE: str(self._folder.path), MEMBER_VARIABLE: self._member(name)}

    def _member(self, name: str) -> str:
        return member_name(f"{self._prefix}{name}", self._starts[name])

    def rank_of(self, name: str, at_start: int) -> int:
        """Return the rank that a process has, or had last; `at_start`: what it was started with, before any term."""
        return self._ranks.get(self._member(name), at_start)

    def _note_ranks(self) -> None:
        if self._folder is not None and (term := self._folder.newest()) is not None:
            self._ranks |= {member: rank for rank, member in enumerate(term.members)}

    def _inside(self) -> list[str]:
        return [name for name in self._starts if name not in self._booting and not self._is_out(name)]

    def _is_out(self, name: str) -> bool:
        """Whether a process has ended, or been left out of the newest term."""
        assert self._folder is not None
        member, term = self._member(name), self._folder.newest()
        return self._folder.is_lost(member) or (term is not None and member not in term.members)

    def lose(self, dead: Collection[str]) -> bool | None:
        """Let the survivors go on without some of this machine's members.

        Returns:
            Whether they do; None: the first machine has not said so yet, or it cannot be written for now.
        """
        folder, members = self._folder, [self._member(name) for name in dead]
        if folder is None:
            return False
        self._note_ranks()
        with folder.patiently():
            for member in members:
                folder.lose(member)
        if not all(map(folder.is_lost, members)):
            return None
        if self._keeper is not None:
            self._keeper.look(admits=False)
        if any(map(folder.is_missed, members)):
            return False
        if self._keeper is not None:
            return None if self._keeper.owes_term else True
        term = folder.newest()
        return True if term is not None and not set(members) & set(term.members) else None

    @property
    def have_lost(self) -> bool:
        """Whether those that are left have been told of a death."""
        return self._folder is not None and self._folder.newest() is not None

    @property
    def are_waited_for(self) -> bool:
        """Whether the others cannot go on before a process of this machine has come, which is the first one."""
        return self._keeper is not None and self._keeper.wait_for_first

    def finish(self, name: str) -> None:
        """Note that a process is done."""
        if self._folder is not None:
            self._folder.finish(self._member(name))

    def drain(self, names: Collection[str]) -> str:
        """Ask members to leave after the step under way; returns why they cannot, or nothing."""
        folder, keeper = self._folder, self._keeper
        if not names or folder is None or any(name not in self._inside() for name in names):
            return "the run has no such member now"
        if keeper is None:
            return "give this command on the first machine"
        return self._drain([self._member(name) for name in names])

    @property
    def span_machines(self) -> bool:
        """Whether members of other machines follow what is decided here."""
        return self._keeper is not None and self._folder is not None and self._folder.is_shared

    def here(self, ranks: Collection[int]) -> list[int]:
        """Return the ranks whose members are on this machine, which is the first one."""
        assert self._keeper is not None
        keeper, members = self._keeper, self._keeper.members
        return [rank for rank in ranks if rank < len(members) and not keeper.is_elsewhere(members[rank])]

    def drain_ranks(self, ranks: Collection[int]) -> str:
        """Ask members of any machine to leave, by their ranks now; returns why they cannot, or nothing.

        Another machine leaves as a whole: what it starts with again is what it was started with.
        """
        assert self._keeper is not None
        keeper, members = self._keeper, self._keeper.members
        if any(rank >= len(members) for rank in ranks):
            return "the run has no such rank now"
        asked = {members[rank] for rank in ranks}
        for machine in {machine_of(member) for member in asked if keeper.is_elsewhere(member)}:
            if rest := [i for i, m in enumerate(members) if machine_of(m) == machine and m not in asked]:
                return f"its machine leaves as a whole, with rank {', '.join(map(str, rest))}"
        return self._drain(asked)

    def say_stop(self) -> bool:
        """Let other machines know that the whole run is being stopped; returns whether the first one is to be told."""
        if self._folder is None:
            return False
        is_news = self._keeper is None and not self._folder.is_stopping
        self._folder.stop()
        return is_news

    @property
    def can_go(self) -> bool:
        """Whether this machine can leave the others, which go on: it is not the first one, nor does the run end."""
        folder = self._folder
        if folder is None or self._keeper is not None or folder.is_stopping or folder.is_closed:
            return False
        inside = self._inside()
        return bool(inside) and all(folder.has_begun(self._member(name)) for name in inside)

    def go(self) -> None:
        """Let all members of this machine leave after the step under way."""
        assert self._folder is not None
        for name in self._inside():
            self._folder.let_leave(self._member(name))

    def _drain(self, members: Collection[str]) -> str:
        folder, keeper = self._folder, self._keeper
        assert folder is not None and keeper is not None
        stay = [each for each in keeper.members if each not in members and not folder.may_leave(each)]
        if not stay:
            return "nobody would be left to train"
        if len(keeper.survivors(members)) < len(keeper.members) - len(members):
            return "a member has yet to begin"
        if all(map(keeper.is_elsewhere, stay)):
            return "nobody of the first machine, where the run's record is, would be left"
        for member in members:
            folder.let_leave(member)
        return ""

    def release(self, name: str) -> bool:
        """Whether a process that has ended had been asked to leave, and goes for good."""
        return self._folder is not None and self._folder.may_leave(self._member(name))

    def forget(self, name: str) -> None:
        """Note that a process that was on its way is gone."""
        assert self._folder is not None
        self._folder.lose(self._member(name))
        self._booting = [each for each in self._booting if each != name]

    def start_again(self, name: str) -> dict[str, str]:
        """Let a process come beside the members; returns what it is to know."""
        self._starts[name] = self._starts.get(name, 0) + 1
        self._booting.append(name)
        return self.environment(name)

    def look(self) -> None:
        """Make, or see, the terms that follow from what the members say: newcomers that are ready are taken in."""
        folder = self._folder
        if folder is None:
            return
        if self._keeper is not None:
            self.is_broken = self._keeper.look(admits=not self.closing)
        if self._booting and (term := folder.newest()) is not None:
            self._booting = [name for name in self._booting if self._member(name) not in term.members]
        self._note_ranks()

    def too_late(self) -> list[str]:
        """Return the processes on their way that nobody waits for, because all is trained."""
        return list(self._booting) if self._folder is not None and self._folder.is_closed else []

    def suspects(self) -> list[str]:
        """Return the members here that have not lost the others, where some have: one of these may be to blame.

        None where nobody complains.
        """
        folder = self._folder
        if folder is None:
            return []
        term = folder.newest()
        number = term.number if term is not None else 0
        if not folder.complains(number):
            return []
        return [name for name in self._inside() if not folder.has_complained(number, self._member(name))]

    def booting(self) -> list[str]:
        """Return the processes that are on their way."""
        return list(self._booting)
