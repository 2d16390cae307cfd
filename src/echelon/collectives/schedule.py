"""A path as data: which span of a vector each rank sends to whom, round by round, and the pieces paths are made of.

A schedule is a plain function of (rank, world size, length): tests check every path for every size without a process,
and one executor (`transfer.py`) runs them all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from echelon.core.shards import Span, cut


@dataclass(frozen=True)
class PathStep:
    """What one rank does in one round; sender and receiver name the same round and span.

    A span is sent as it is after all earlier steps. What is received is added to the span, or replaces it.
    """

    round: int
    send_to: int | None = None
    send: Span = (0, 0)
    recv_from: int | None = None
    recv: Span = (0, 0)
    add: bool = False


@dataclass(frozen=True)
class Ring:
    """Ranks that pass pieces on in a circle; `index` is this rank's place among them."""

    members: Sequence[int]
    index: int

    def piece(self, pieces: Sequence[Span], back: int) -> Span:
        """Return the piece of the member `back` places before this one."""
        return pieces[(self.index - back) % len(self.members)]

    @property
    def following(self) -> int:
        """The member this rank sends to."""
        return self.members[(self.index + 1) % len(self.members)]

    @property
    def preceding(self) -> int:
        """The member this rank receives from."""
        return self.members[(self.index - 1) % len(self.members)]


def reduce_scatter(ring: Ring, pieces: Sequence[Span], first_round: int) -> list[PathStep]:
    """N - 1 rounds after which member i holds the sum of piece i; each piece travels once round the ring."""
    steps = range(len(ring.members) - 1)
    return [
        PathStep(
            first_round + s,
            send_to=ring.following,
            send=ring.piece(pieces, s + 1),
            recv_from=ring.preceding,
            recv=ring.piece(pieces, s + 2),
            add=True,
        )
        for s in steps
    ]


def all_gather(ring: Ring, pieces: Sequence[Span], first_round: int) -> list[PathStep]:
    """N - 1 rounds after which every member holds every piece, given that member i held piece i."""
    steps = range(len(ring.members) - 1)
    return [
        PathStep(
            first_round + s,
            send_to=ring.following,
            send=ring.piece(pieces, s),
            recv_from=ring.preceding,
            recv=ring.piece(pieces, s + 1),
        )
        for s in steps
    ]


def ring_sum(ring: Ring, span: Span, first_round: int) -> list[PathStep]:
    """2 (N - 1) rounds after which every member holds the sum of a span."""
    pieces = cut(span, len(ring.members))
    halfway = first_round + len(ring.members) - 1
    return reduce_scatter(ring, pieces, first_round) + all_gather(ring, pieces, halfway)
