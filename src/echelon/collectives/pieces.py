"""Whether a rank's long messages travel in pieces: over a slow link, as each sender measures it for itself.

A message that is longer than a connection's first receive window waits for the receiver to announce more, and what
both directions of a link queue stands before the other's acknowledgements. In pieces that fit the window and take
turns, four ranks over 10 Mbit/s need 1.1 times their bytes' time instead of 1.4 to 2 (benchmarks/RESULTS.md). Over a
fast link each piece costs a wake-up instead, and messages stay whole. Both ends must cut alike: a sender tells in each
message how the next one will be cut, so that no message is sent for it and ranks may differ. No bit of a result
depends on it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from echelon.core.shards import Span, cut

PIECE_BYTES = 32 * 1024
"""Half of the receive window that TCP on Linux begins with: of 55 kB, which fit into it, some still wait."""
SLOW_BYTES_PER_S, FAST_BYTES_PER_S = 15e6, 40e6
"""Below 120 Mbit/s messages are cut, above 320 Mbit/s they are whole again; between them it stays."""
TOLD_AT = 1
"""The byte of a message's header that says how the sender's next one is cut."""
_TIMED_BYTES = 64 * 1024
_RECENT = 8


@dataclass
class MessageCutter:
    """What one rank has told the others of its messages, and heard of theirs, by place."""

    _slow: bool = False
    _told: dict[int, bool] = field(default_factory=dict)
    _heard: dict[int, bool] = field(default_factory=dict)
    _rates: deque[float] = field(default_factory=lambda: deque(maxlen=_RECENT))

    def of_outgoing(self, place: int, n_bytes: int) -> list[Span]:
        """Return the pieces of a message to a place, as it was told."""
        return _pieces(n_bytes, self._told.get(place, False))

    def of_incoming(self, place: int, n_bytes: int) -> list[Span]:
        """Return the pieces of a message from a place, as it told."""
        return _pieces(n_bytes, self._heard.get(place, False))

    def tell(self, outgoing: Mapping[int, Tensor]) -> None:
        """Write into messages (uint8, 1-D) how the next ones will be cut: once these were cut as told before."""
        for message in {id(m): m for m in outgoing.values()}.values():
            message[TOLD_AT] = int(self._slow)

    def passed(self, outgoing: Mapping[int, Tensor], received: Mapping[int, Tensor], seconds: float) -> None:
        """Take in that messages, uint8 and 1-D, were exchanged in so many seconds."""
        self._told |= dict.fromkeys(outgoing, self._slow)
        self._heard |= {place: bool(message[TOLD_AT]) for place, message in received.items()}
        n_bytes = sum(message.nbytes for message in outgoing.values())
        if n_bytes >= _TIMED_BYTES and seconds > 0:
            self._rates.append(n_bytes / seconds)
            fastest = max(self._rates)  # ranks that wait for one another are no slow link
            self._slow = fastest < (FAST_BYTES_PER_S if self._slow else SLOW_BYTES_PER_S)


def _pieces(n_bytes: int, many: bool) -> list[Span]:
    count = -(-n_bytes // PIECE_BYTES) if many else min(1, n_bytes)
    return cut((0, n_bytes), count) if count else []
