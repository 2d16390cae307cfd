"""How many samples of a batch each rank gets: a pure function, so that all ranks cut a batch alike."""

from __future__ import annotations

from collections.abc import Sequence


def share_sizes(samples: int, ranks: int, weights: Sequence[int] = ()) -> list[int]:
    """Return the samples of each rank's part of a batch, in the order of the ranks; they add up to `samples`.

    Parts are as weights are, by largest remainder: where weights add up to `samples`, each part is its weight. What is
    left over goes to the largest remainders, and to the first ranks among equal ones.

    Args:
        weights: of each rank, none negative, not all 0; empty: all are alike, and sizes differ by at most 1.

    >>> share_sizes(10, 4), share_sizes(64, 3, (30, 30, 4)), share_sizes(10, 3, (30, 30, 4))
    ([3, 3, 2, 2], [30, 30, 4], [5, 5, 0])
    """
    if not weights:
        size, more = divmod(samples, ranks)
        return [size + (rank < more) for rank in range(ranks)]
    if len(weights) != ranks or min(weights) < 0 or not any(weights):
        raise ValueError(f"weights of {ranks} ranks that are none negative and not all 0 are needed, not {weights}")
    total = sum(weights)
    sizes = [samples * weight // total for weight in weights]
    by_remainder = sorted(range(ranks), key=lambda rank: (-(samples * weights[rank] % total), rank))
    for rank in by_remainder[: samples - sum(sizes)]:
        sizes[rank] += 1
    return sizes
