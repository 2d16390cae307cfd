"""How much may be on its way to a peer at a time, and which value travels to it next.

What is on its way can no longer be overtaken by what is needed sooner (credits of ByteScheduler; Peng et al. 2019). Too
little leaves the link idle while an acknowledgement travels back. So it is what the path holds, measured as BBR does
(Cardwell et al. 2016: the highest rate of arrival times the shortest way there and back), and two pieces more.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from dataclasses import dataclass, field

from echelon.ps.messages import Pull

LEAST_BYTES = 2 << 20
"""Two of the largest keys, by default: one travels, and the next waits behind it while the first is acknowledged."""
MOST_BYTES = 8 << 20
RATES = 64


@dataclass(frozen=True)
class _Sent:
    """A message on its way: its bytes, when it left, and how many bytes had arrived by then."""

    n_bytes: int
    sent_s: float
    arrived: int


@dataclass
class FlightWindow:
    """Counts the bytes that are on their way to a peer, by a message's number.

    Attributes:
        in_flight: bytes that are on their way.
        limit: bytes from which on nothing more leaves.
        measures: the limit follows what the path holds.
    """

    measures: bool
    limit: int = MOST_BYTES
    in_flight: int = 0
    _sent: dict[int, _Sent] = field(default_factory=dict)
    _arrived: int = 0
    _shortest_s: float = math.inf
    _rates: deque[float] = field(default_factory=lambda: deque(maxlen=RATES))

    def __post_init__(self) -> None:
        if self.measures:
            self.limit = LEAST_BYTES

    @property
    def has_room(self) -> bool:
        """Whether another message may leave."""
        return self.in_flight < self.limit

    def leaves(self, number: int, n_bytes: int, now_s: float) -> None:
        """Count a message that leaves now; one that leaves again is counted once."""
        self.forget(number)
        self._sent[number] = _Sent(n_bytes, now_s, self._arrived)
        self.in_flight += n_bytes

    def arrived(self, number: int, now_s: float) -> None:
        """Count a message as arrived; one that is not on its way changes nothing."""
        sent = self._sent.pop(number, None)
        if sent is None:
            return
        self.in_flight -= sent.n_bytes
        self._arrived += sent.n_bytes
        took_s = now_s - sent.sent_s
        if not self.measures or took_s <= 0:
            return
        self._shortest_s = min(self._shortest_s, took_s)
        self._rates.append((self._arrived - sent.arrived) / took_s)
        self.limit = min(MOST_BYTES, LEAST_BYTES + int(max(self._rates) * self._shortest_s))

    def forget(self, number: int) -> None:
        """Count a message as not on its way."""
        sent = self._sent.pop(number, None)
        self.in_flight -= sent.n_bytes if sent is not None else 0


class OwedValues:
    """The values that wait to leave for one worker's connection, and those that are on their way there."""

    def __init__(self, worker: str) -> None:
        self.worker, self.window = worker, FlightWindow(measures=True)
        self._heap: list[tuple[int, int, Pull]] = []
        self._turn = 0

    def owe(self, pull: Pull) -> None:
        """Let a value wait for its turn: the lowest place in the forward pass leaves first."""
        self._turn += 1
        heapq.heappush(self._heap, (pull.place, self._turn, pull))

    def next(self) -> Pull | None:
        """Return what is to leave now, which waits no more; None: nothing waits, or enough is on its way."""
        return heapq.heappop(self._heap)[2] if self._heap and self.window.has_room else None

    def forget(self, key: int) -> None:
        """Owe a key's value no more: it is asked for anew, and what was on its way may be lost."""
        self.window.forget(key)
        self._heap = [entry for entry in self._heap if entry[2].key != key]
        heapq.heapify(self._heap)

    def waiting(self) -> list[Pull]:
        """Return all that waits, in its order."""
        return [pull for *_, pull in sorted(self._heap, key=lambda entry: entry[:2])]
