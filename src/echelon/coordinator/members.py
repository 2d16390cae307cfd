"""Who takes part in a run, and who has been silent for too long. Pure bookkeeping; time comes in as an argument."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

BEATS = 10
LEAST_S = 2.0


@dataclass
class RunMember:
    """One process: its connection, its session (drawn at its start), when it was last heard, what it said."""

    name: str
    role: str
    peer: bytes
    session: int
    heard_s: float
    address: str = ""
    info: dict[str, Any] = field(default_factory=dict)
    beat: dict[str, Any] = field(default_factory=dict)
    gap_s: float = 0.2

    @property
    def is_home(self) -> bool:
        """Whether it is on the first machine: only that one's disk surely holds the run's checkpoints."""
        return self.info.get("machine", 0) == 0


class Members:
    """The processes that live, by name. A deadline follows from how often each one was heard while it lived."""

    def __init__(self) -> None:
        self._by_name: dict[str, RunMember] = {}

    def __getitem__(self, name: str) -> RunMember:
        return self._by_name[name]

    def get(self, name: str) -> RunMember | None:
        """Return a member, or None."""
        return self._by_name.get(name)

    def add(self, member: RunMember) -> None:
        """Take a member in; one of the same name is replaced."""
        self._by_name[member.name] = member

    def remove(self, name: str) -> RunMember | None:
        """Let a member go."""
        return self._by_name.pop(name, None)

    def heard(self, name: str, peer: bytes, session: int, now_s: float) -> RunMember | None:
        """Note that a message came; None when its sender is not a member in this session."""
        member = self._by_name.get(name)
        if member is None or member.session != session:
            return None
        # The longest gap so far, forgotten slowly: a busy machine's members are not called dead.
        member.gap_s = max(0.95 * member.gap_s, now_s - member.heard_s)
        member.heard_s, member.peer = now_s, peer
        return member

    def of_role(self, role: str) -> list[RunMember]:
        """Return the members of a role by name."""
        return sorted((m for m in self._by_name.values() if m.role == role), key=lambda m: m.name)

    def all(self) -> list[RunMember]:
        """Return all members."""
        return list(self._by_name.values())

    def silent(self, now_s: float) -> list[RunMember]:
        """Return who has not been heard for longer than its deadline."""
        return [m for m in self._by_name.values() if now_s - m.heard_s > deadline_s(m)]


def deadline_s(member: RunMember) -> float:
    """Return after how many seconds of silence a member counts as dead: ten times its longest gap, at least 2 s."""
    return max(LEAST_S, BEATS * min(member.gap_s, 3.0))


@dataclass
class Serving:
    """Who serves one index: the primary and, where there is one, its standby."""

    primary: str = ""
    standby: str = ""
    ready: bool = False
    standby_ready: bool = False
