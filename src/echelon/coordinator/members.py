"""Who takes part in a run, and who has been silent for too long. Pure bookkeeping; time comes in as an argument."""

from __future__ import annotations

from dataclasses import dataclass

from echelon.coordinator.messages import JoinServer, JoinWorker, ServerBeat, ServerEntry, WorkerBeat

BEATS = 10
LEAST_S = 2.0
MOST_S = 60.0


@dataclass
class RunMember:
    """One process: its connection, its session (drawn at its start), when it was last heard, what it said."""

    name: str
    peer: bytes
    session: int
    heard_s: float
    join: JoinWorker | JoinServer
    beat: WorkerBeat | ServerBeat | None = None
    gap_s: float = 0.2
    lived_s: float = 0.0
    """The longest silence after which it was there again, though it was taken for dead."""

    @property
    def is_worker(self) -> bool:
        """Whether it is a worker, not a server."""
        return isinstance(self.join, JoinWorker)

    @property
    def is_home(self) -> bool:
        """Whether it is on the first machine: only that one's disk surely holds the run's checkpoints."""
        return isinstance(self.join, JoinWorker) and self.join.machine == 0


class MemberList:
    """The processes that live, by name. A deadline follows from how often each one was heard while it lived."""

    def __init__(self) -> None:
        self._by_name: dict[str, RunMember] = {}
        self._removed: dict[str, RunMember] = {}

    def get(self, name: str) -> RunMember | None:
        """Return a member, or None."""
        return self._by_name.get(name)

    def add(self, member: RunMember) -> None:
        """Take a member in; one of the same name is replaced. One that was taken for dead has longer from now on."""
        before = self._by_name.get(member.name) or self._removed.pop(member.name, None)
        if before is not None and before.session == member.session:
            member.lived_s = max(before.lived_s, member.heard_s - before.heard_s)
        self._by_name[member.name] = member

    def remove(self, name: str) -> RunMember | None:
        """Let a member go."""
        member = self._by_name.pop(name, None)
        if member is not None:
            self._removed[name] = member
        return member

    def heard(self, name: str, peer: bytes, session: int, now_s: float) -> RunMember | None:
        """Note that a message came; None when its sender is not a member in this session."""
        member = self._by_name.get(name)
        if member is None or member.session != session:
            return None
        # The longest gap so far, forgotten slowly: a busy machine's members are not called dead.
        member.gap_s = max(0.95 * member.gap_s, now_s - member.heard_s)
        member.heard_s, member.peer = now_s, peer
        return member

    @property
    def workers(self) -> list[RunMember]:
        """The workers in order of their numbers."""
        return sorted((m for m in self._by_name.values() if m.is_worker), key=lambda m: (len(m.name), m.name))

    @property
    def worker_joins(self) -> list[JoinWorker]:
        """What the workers said when they joined, in order of their numbers."""
        return [member.join for member in self.workers if isinstance(member.join, JoinWorker)]

    @property
    def servers(self) -> list[RunMember]:
        """The servers and their standbys by name."""
        return sorted((m for m in self._by_name.values() if not m.is_worker), key=lambda m: m.name)

    def all(self) -> list[RunMember]:
        """Return all members."""
        return list(self._by_name.values())

    def silent(self, now_s: float) -> list[RunMember]:
        """Return who has not been heard for longer than its deadline."""
        return [m for m in self._by_name.values() if now_s - m.heard_s > deadline_s(m)]


def deadline_s(member: RunMember) -> float:
    """Return after how many seconds of silence a member counts as dead: ten times its longest gap, at least 2 s.

    Of one that was wrongly taken for dead at least twice as long as it was silent then, at most a minute.
    """
    return max(LEAST_S, BEATS * min(member.gap_s, 3.0), min(2 * member.lived_s, MOST_S))


def may_serve(name: str, index: int, standbys: int) -> bool:
    """Return whether a process of this name serves an index, or stands by where the run has standbys.

    >>> may_serve("server0", 0, 0), may_serve("standby0", 0, 0), may_serve("server1", 0, 1)
    (True, False, False)
    """
    return name == f"server{index}" or (standbys > 0 and name == f"standby{index}")


@dataclass
class ServingPair:
    """Who serves one index: the primary and, where there is one, its standby; empty names: nobody.

    `served_s` is when the index was last known to have a primary; `membership` the number of the standby's stay.
    """

    served_s: float
    primary: str = ""
    standby: str = ""
    ready: bool = False
    standby_ready: bool = False
    membership: int = 0

    def takes_as_standby(self, name: str, join: JoinServer) -> bool:
        """Whether a server that joins is the standby: it says so, or another one serves already."""
        return self.primary != name and (join.standby or bool(self.primary))

    def join_primary(self, name: str, ready: bool) -> None:
        """Let a server serve; where it was the standby there is none now."""
        self.primary, self.ready = name, ready
        if self.standby == name:
            self.standby, self.standby_ready = "", False

    def join_standby(self, name: str, join: JoinServer, next_membership: int) -> None:
        """Let a server stand by. What it took in an earlier membership lacks what the primary did between the two."""
        if self.standby != name:
            self.standby, self.membership = name, next_membership
        self.standby_ready = join.ready and join.standby and join.membership == self.membership

    def leave(self, name: str) -> bool:
        """Let a server go; returns whether it was the primary. A standby that is ready takes its place."""
        if self.standby == name:
            self.standby, self.standby_ready = "", False
        if self.primary != name:
            return False
        if self.standby_ready:
            self.primary, self.ready = self.standby, False
            self.standby, self.standby_ready = "", False
        else:
            self.primary, self.ready = "", False
        return True


def server_entry(pair: ServingPair, members: MemberList, set_up: bool) -> ServerEntry:
    """Return what all are told of an index. A server without anything is told of as such until the run is set up."""
    primary = members.get(pair.primary)
    standby = pair.standby if members.get(pair.standby) is not None else ""
    membership = pair.membership if standby else 0
    if primary is None or not isinstance(primary.join, JoinServer):
        return ServerEntry("", 0, False, standby, False, membership)
    join = primary.join
    return ServerEntry(join.address, primary.session, pair.ready, standby, join.empty and not set_up, membership)
