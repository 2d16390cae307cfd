"""Direct exchange: each rank sums one piece, which all others send it, and sends the sum to all (two steps).

Helps: Small messages between a few ranks, and busy processors: only two messages follow each other.
Costs: N - 1 connections used at once; many large messages to one rank at a time can overflow a switch.
Needs: nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from echelon.collectives.base import Path
from echelon.collectives.schedule import PathStep
from echelon.core.shards import cut


@dataclass(frozen=True)
class DirectPath(Path):
    """Each rank sends 2 (N - 1) / N of the vector, in 2 (N - 1) messages (Thakur, Rabenseifner and Gropp 2005).

    Those of the reduce-scatter leave at once, as each is a piece that its sender adds nothing to; those of the
    all-gather as soon as the rank's own piece is summed.
    """

    name: ClassVar[str] = "direct"

    def schedule(self, rank: int, size: int, numel: int) -> list[PathStep]:
        """Return a pairwise reduce-scatter and a pairwise all-gather: in round r each rank sends r places further."""
        pieces = cut((0, numel), size)
        own = pieces[rank]
        steps = []
        for distance in range(1, size):
            to, back = (rank + distance) % size, (rank - distance) % size
            steps.append(PathStep(distance - 1, to, pieces[to], back, own, add=True))
            steps.append(PathStep(size + distance - 2, to, own, back, pieces[back]))
        return steps


PATH = DirectPath
