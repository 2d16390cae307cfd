"""Ring all-reduce (Patarasuk and Yuan 2009): every rank sends only to the next one.

Helps: Large messages with a codec over equal links. On GPUs, backend does the same by itself.
Costs: latency that grows with the number N of ranks: 2 (N - 1) rounds.
Needs: nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from echelon.collectives import schedule
from echelon.collectives.base import Path


@dataclass(frozen=True)
class RingPath(Path):
    """Each rank sends 2 (N - 1) / N of the vector, the fewest bytes possible."""

    name: ClassVar[str] = "ring"

    def schedule(self, rank: int, size: int, numel: int) -> list[schedule.PathStep]:
        """Return a reduce-scatter and an all-gather around the ring of all ranks."""
        return schedule.ring_sum(schedule.Ring(range(size), rank), (0, numel), first_round=0)


PATH = RingPath
