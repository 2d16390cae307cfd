"""Recursive halving and doubling (Rabenseifner 2004): 2 log2 N rounds, for any number N of ranks.

Helps: Small messages between many ranks: it has the fewest rounds.
Costs: two more rounds, and a whole vector more for some ranks, if N is not a power of two.
Needs: nothing; a power of two of ranks is best.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from echelon.collectives.base import Path
from echelon.collectives.schedule import PathStep
from echelon.core.shards import Span


@dataclass(frozen=True)
class HalvingDoubling(Path):
    """In each round, ranks exchange half of what they hold with a partner; then the same way back.

    Each rank sends 2 (N - 1) / N of the vector. If N = 2^k + r is not a power of two, r ranks first add their vector to
    their neighbour's, and get the result from it at the end.
    """

    name: ClassVar[str] = "halving_doubling"

    def schedule(self, rank: int, size: int, numel: int) -> list[PathStep]:
        """Return the halving and the doubling, and before and after them what folds odd ranks into their neighbours."""
        active = 1 << (size.bit_length() - 1)
        folded = 2 * (size - active)
        rounds = active.bit_length() - 1
        first, last, whole = 0, 2 * rounds + 1, (0, numel)
        if rank < folded and rank % 2:
            return [PathStep(first, send_to=rank - 1, send=whole), PathStep(last, recv_from=rank - 1, recv=whole)]
        index = rank // 2 if rank < folded else rank - folded // 2
        steps = _halve_and_double(index, rounds, whole, lambda i: 2 * i if 2 * i < folded else i + folded // 2)
        if rank < folded:
            fold_in = PathStep(first, recv_from=rank + 1, recv=whole, add=True)
            steps = [fold_in, *steps, PathStep(last, send_to=rank + 1, send=whole)]
        return steps


def _halve_and_double(index: int, rounds: int, span: Span, rank_of: Callable[[int], int]) -> list[PathStep]:
    """Exchange halves with the partner that differs in one bit of the index, highest bit first; then go back."""
    halving: list[PathStep] = []
    doubling: list[PathStep] = []
    for r in range(rounds):
        bit = 1 << (rounds - 1 - r)
        partner = rank_of(index ^ bit)
        middle = span[0] + (span[1] - span[0] + 1) // 2
        kept, given = (span[0], middle), (middle, span[1])
        if index & bit:
            kept, given = given, kept
        halving.append(PathStep(1 + r, partner, given, partner, kept, add=True))
        doubling.append(PathStep(2 * rounds - r, partner, kept, partner, given))
        span = kept
    return halving + doubling[::-1]


PATH = HalvingDoubling
