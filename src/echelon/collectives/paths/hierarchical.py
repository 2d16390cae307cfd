"""Sum inside groups of ranks that are close to each other, then between groups, then spread inside."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from echelon.collectives.base import Path
from echelon.collectives.schedule import Ring, Span, Step, all_gather, cut, reduce_scatter


@dataclass(frozen=True)
class Place:
    """Where a rank stands: its group's members, and for the piece it owns the owners in all groups."""

    inside: Ring
    between: Ring | None
    pieces: Sequence[Span]


@dataclass(frozen=True)
class Hierarchical(Path):
    """Ranks 0..g-1 are one group, g..2g-1 the next, and so on; the last one may be smaller.

    A rank sends 2 (g - 1) / g of the vector inside its group and 2 (m - 1) / m of one g-th of it between the m groups.
    With groups of unequal size the vector is cut for the smallest group, so that each piece has an owner in all.

    Attributes:
        group: ranks in a group, such as those of one machine.
    """

    name: ClassVar[str] = "hierarchical"
    group: int

    def __post_init__(self) -> None:
        if self.group < 1:
            raise ValueError(f"group must be at least 1, not {self.group}")

    def place(self, rank: int, size: int, numel: int) -> Place:
        """Return the groups of a rank and the pieces that the vector is cut into."""
        firsts = range(0, size, self.group)
        groups = [range(first, min(first + self.group, size)) for first in firsts]
        owners = min(len(members) for members in groups)
        mine, index = groups[rank // self.group], rank % self.group
        pieces = cut((0, numel), owners) + [(numel, numel)] * (len(mine) - owners)
        between = Ring([members[index] for members in groups], rank // self.group) if index < owners else None
        return Place(Ring(mine, index), between, pieces)

    def schedule(self, rank: int, size: int, numel: int) -> list[Step]:
        place = self.place(rank, size, numel)
        between_from, spread_from = self.rounds(size)
        steps = reduce_scatter(place.inside, place.pieces, first_round=0)
        if place.between is not None:
            ring = place.between
            parts = cut(place.pieces[place.inside.index], len(ring.members))
            steps += reduce_scatter(ring, parts, between_from)
            steps += all_gather(ring, parts, between_from + len(ring.members) - 1)
        return steps + all_gather(place.inside, place.pieces, spread_from)

    def rounds(self, size: int) -> tuple[int, int]:
        """Return the first round between the groups and the first one of spreading inside."""
        inside = min(self.group, size) - 1
        return inside, inside + 2 * (-(-size // self.group) - 1)


PATH = Hierarchical
