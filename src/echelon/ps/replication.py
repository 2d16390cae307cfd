"""What a server owes while a standby follows it: acknowledgements that wait until the standby holds a push too.

The standby does the same operations in the same order, so it is the same server. When the primary dies, the scheduler
promotes it; workers push again what was not acknowledged, and what was counted already is known as such.
"""

from __future__ import annotations

from collections import deque

from echelon.ps.messages import PushAck


class ReplicationLog:
    """The standby, the number of the last operation that was sent to it, and the acknowledgements that are owed."""

    def __init__(self) -> None:
        self.standby = b""
        self.standby_name = ""
        self._number = 0
        self._owed: deque[tuple[int, bytes, PushAck]] = deque()

    @property
    def attached(self) -> bool:
        """Whether a standby takes this server's operations."""
        return bool(self.standby)

    def attach(self, peer: bytes, name: str) -> None:
        """Let a standby follow."""
        self.standby, self.standby_name = peer, name

    def detach(self) -> None:
        """Have no standby any more."""
        self.standby, self.standby_name = b"", ""

    def next_number(self) -> int:
        """Return the number of the next operation."""
        self._number += 1
        return self._number

    def owe(self, number: int, peer: bytes, ack: PushAck) -> None:
        """Hold an acknowledgement back until the standby has an operation."""
        self._owed.append((number, peer, ack))

    def release(self, number: int | None = None) -> list[tuple[bytes, PushAck]]:
        """Return the acknowledgements that need not wait: up to an operation, or all."""
        released = []
        while self._owed and (number is None or self._owed[0][0] <= number):
            _, peer, ack = self._owed.popleft()
            released.append((peer, ack))
        return released

    def forget(self) -> None:
        """Owe nothing, to nobody."""
        self._owed.clear()
        self.detach()
