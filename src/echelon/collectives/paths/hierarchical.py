"""Sum inside groups of ranks that are close to each other, then between groups, then spread the result inside.

Helps: Machines of several ranks each, with slow links between them: each machine sends its part only once.
Costs: more rounds; on links that are all alike it gains nothing.
Needs: group = number of ranks of a machine.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from echelon.collectives.base import Path, Tiers
from echelon.collectives.schedule import PathStep, Ring, all_gather, reduce_scatter, ring_sum
from echelon.core.bounds import Bounds
from echelon.core.shards import cut


@dataclass(frozen=True)
class Hierarchical(Path):
    """Ranks 0 to g-1 are one group, g to 2g-1 the next, and so on; the last group may be smaller.

    A rank sends 2 (g - 1) / g of the vector inside its group, and 2 (m - 1) / m of a g-th of it between the m groups. A
    codec encodes only what is sent between groups. (`powersgd` works on every link, because it needs whole matrices;
    its messages are small there, too.)

    Attributes:
        group: ranks in a group, such as those of one machine.
    """

    name: ClassVar[str] = "hierarchical"
    examples: ClassVar[tuple[str, ...]] = tuple(f"hierarchical(group={size})" for size in (2, 3, 1, 4, 8))
    group: Annotated[int, Bounds(least=1)]

    def tiers(self, rank: int, size: int, numel: int) -> Tiers:
        """Return the ring of this rank's group, the ring between groups that it is in, and the spans of the pieces."""
        groups = [range(first, min(first + self.group, size)) for first in range(0, size, self.group)]
        owners = min(len(members) for members in groups)
        mine, index = groups[rank // self.group], rank % self.group
        pieces = cut((0, numel), owners) + [(numel, numel)] * (len(mine) - owners)
        between = Ring([members[index] for members in groups], rank // self.group) if index < owners else None
        return Tiers(Ring(mine, index), between, pieces, self._between_round(size) + 2 * (len(groups) - 1))

    def _between_round(self, size: int) -> int:
        return min(self.group, size) - 1

    def schedule(self, rank: int, size: int, numel: int) -> list[PathStep]:
        """Return a reduce-scatter in the group, a sum of a piece between groups, and an all-gather in the group."""
        tiers = self.tiers(rank, size, numel)
        steps = reduce_scatter(tiers.inside, tiers.pieces, first_round=0)
        if tiers.between is not None:
            steps += ring_sum(tiers.between, tiers.pieces[tiers.inside.index], self._between_round(size))
        return steps + all_gather(tiers.inside, tiers.pieces, tiers.spread_round)


PATH = Hierarchical
