"""Messages of codecs between ranks: all to all, of known or unknown length."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.collectives.schedule import Ring
from echelon.collectives.transfer import PeerLostError
from echelon.collectives.wire import framing_bytes
from echelon.core.shards import Span, cut

_LENGTH_TAG, _BODY_TAG = 1_000_000, 1_000_001
HEADER_BYTES = 8
TURN_BYTES = 16 * 1024
"""From this length on a rank's messages leave one after the other: shorter ones would wait for late ranks in vain."""
_Piece = tuple[int, Tensor]
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
    """What one rank has told the others of how it cuts its messages, and heard of theirs, by place.

    A message that is longer than a connection's first receive window waits for the receiver to announce more, and what
    both directions of a link queue stands before the other's acknowledgements. In pieces that fit the window and take
    turns, four ranks over 10 Mbit/s need 1.1 times their bytes' time instead of 1.4 to 2 (benchmarks/RESULTS.md). Over
    a fast link each piece costs a wake-up instead, and messages stay whole. Each sender measures its link for itself.
    Both ends must cut alike: a sender tells in each message how the next one will be cut, so that no message is sent
    for it and ranks may differ. No bit of a result depends on it.
    """

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


@dataclass(frozen=True)
class Mailbox:
    """Sends messages between some ranks of a group."""

    group: dist.ProcessGroup
    ring: Ring
    cutter: MessageCutter = field(default_factory=MessageCutter)

    @property
    def size(self) -> int:
        """Ranks that take part."""
        return len(self.ring.members)

    def others(self) -> list[int]:
        """Places among the members of all but this rank, the next one first, so that no rank is everyone's first."""
        return [(self.ring.index + i) % self.size for i in range(1, self.size)]

    def exchange(self, outgoing: Mapping[int, Tensor], incoming: Mapping[int, int]) -> tuple[dict[int, Tensor], int]:
        """Send uint8 1-D messages; return those received, both by place among the members, and the bytes sent.

        Long ones take turns, as in an all-to-all by pairs (Thakur, Rabenseifner and Gropp 2005): each leaves once one
        has come that was sent in the turn before. Over a slow link they travel in pieces (`MessageCutter`).

        Args:
            outgoing: a sealed message for each place that gets one; the second byte is written.
            incoming: the bytes of each sender's message, as both know or as `announce` returned.

        Raises:
            PeerLostError: a rank did not answer before the group's timeout.
        """
        device = next((m.device for m in outgoing.values()), torch.device("cpu"))
        received = {p: torch.empty(n, dtype=torch.uint8, device=device) for p, n in incoming.items()}
        self.cutter.tell(_sealed(outgoing))
        began = time.perf_counter()
        sent = self._transfer(outgoing, received, _BODY_TAG)
        self.cutter.passed(_sealed(outgoing), _sealed(received), time.perf_counter() - began)
        return received, sent

    def announce(self, outgoing: Mapping[int, Tensor], senders: Iterable[int]) -> tuple[dict[int, int], int]:
        """Tell the length of each outgoing message, 1-D; return the length of each sender's, and the bytes sent."""
        device = next((m.device for m in outgoing.values()), torch.device("cpu"))
        said = {p: torch.tensor([m.numel()], dtype=torch.int64, device=device) for p, m in outgoing.items()}
        heard = {p: torch.empty(1, dtype=torch.int64, device=device) for p in senders}
        sent = self._transfer(said, heard, _LENGTH_TAG)
        return {p: int(n) for p, n in heard.items()}, sent

    def _transfer(self, outgoing: Mapping[int, Tensor], into: Mapping[int, Tensor], tag: int) -> int:
        outgoing = {p: t for p, t in outgoing.items() if t.numel()}
        into = {p: t for p, t in into.items() if t.numel()}
        in_turns = any(t.nbytes >= TURN_BYTES and not t.is_cuda for t in [*outgoing.values(), *into.values()])
        try:
            messages = (self._take_turns if in_turns else self._send_at_once)(outgoing, into, tag)
        except RuntimeError as error:
            raise PeerLostError(f"rank {self.group.rank()} of the group lost one it exchanges with: {error}") from error
        on_gpu = any(t.is_cuda for t in outgoing.values())
        return sum(t.nbytes for t in outgoing.values()) + framing_bytes(messages, on_gpu)

    def _send_at_once(self, outgoing: Mapping[int, Tensor], into: Mapping[int, Tensor], tag: int) -> int:
        """Send all messages; returns how many."""
        members, group = self.ring.members, self.group
        operations = [
            *(dist.P2POp(dist.irecv, t, group=group, group_peer=members[p], tag=tag) for p, t in into.items()),
            *(dist.P2POp(dist.isend, t, group=group, group_peer=members[p], tag=tag) for p, t in outgoing.items()),
        ]
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        return len(outgoing)

    def _take_turns(self, outgoing: Mapping[int, Tensor], into: Mapping[int, Tensor], tag: int) -> int:
        """Send to the next place, then to the one after it, ...; each piece once that of the turn before has come.

        Returns how many pieces left.

        No ranks can wait for each other in a circle, even where one sends all at once: what leaves in a turn waits for
        earlier turns alone.
        """
        turns = [turn for distance in range(1, self.size) for turn in self._turns(distance, outgoing, into)]
        arrivals = [come and self.group.recv([come[1]], self.ring.members[come[0]], tag) for _, come in turns]
        leaving = []
        for (leave, _), arrival in zip(turns, arrivals, strict=True):
            if leave is not None:
                leaving.append(self.group.send([leave[1]], self.ring.members[leave[0]], tag))
            if arrival is not None:
                arrival.wait()
        for work in leaving:
            work.wait()
        return len(leaving)

    def _turns(
        self, distance: int, outgoing: Mapping[int, Tensor], into: Mapping[int, Tensor]
    ) -> Iterator[tuple[_Piece | None, _Piece | None]]:
        """Yield what leaves for the place so far ahead, and what comes from the one so far back, piece by piece."""
        ahead, back = (self.ring.index + distance) % self.size, (self.ring.index - distance) % self.size
        leave, come = outgoing.get(ahead), into.get(back)
        leaving = self.cutter.of_outgoing(ahead, leave.nbytes) if leave is not None else []
        coming = self.cutter.of_incoming(back, come.nbytes) if come is not None else []
        for left, came in zip_longest(leaving, coming):
            yield (
                None if left is None or leave is None else (ahead, leave[slice(*left)]),
                None if came is None or come is None else (back, come[slice(*came)]),
            )


def _sealed(messages: Mapping[int, Tensor]) -> dict[int, Tensor]:
    """Return those that have a header on a processor."""
    return {place: m for place, m in messages.items() if m.numel() >= HEADER_BYTES and not m.is_cuda}


def seal(body: Tensor, usable: bool) -> Tensor:
    """Put the word before a message, uint8 1-D, that says whether it can be used; an unusable one keeps its length."""
    message = torch.empty(HEADER_BYTES + body.numel(), dtype=torch.uint8, device=body.device)
    message[:HEADER_BYTES].zero_()
    message[:1].fill_(int(usable))  # a plain number written to a place would make a GPU wait
    message[HEADER_BYTES:] = body
    return message


def unsealed(messages: Mapping[int, Tensor]) -> dict[int, tuple[Tensor, bool]]:
    """Return each message's body, uint8 1-D, and whether it can be used; a GPU is waited for once."""
    words = torch.stack([message[0] for message in messages.values()]).tolist() if messages else []
    return {j: (message[HEADER_BYTES:], bool(w)) for (j, message), w in zip(messages.items(), words, strict=True)}
