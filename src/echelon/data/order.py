"""Which sample comes when, and every random number of the input: pure functions of (seed, epoch, index).

Randomness is counter-based: a number is a hash of where it is used, not of what was drawn before. That makes it the
same whoever computes it (any rank, any loader process), and a whole batch's numbers one vectorised expression.
The hash is the finaliser of SplitMix64 (Steele, Lea, Flood, "Fast splittable pseudorandom number generators", 2014).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from echelon.core.shares import share_sizes
from echelon.data.base import Shard

Indices = NDArray[np.int64]

_GOLDEN = 0x9E3779B97F4A7C15
_MASK = 2**64 - 1
_GROUPED = 64  # batches: among fewer, lengths differ more; among more, batches of neighbours come back together
# separate streams, so that no two uses share numbers
_ORDER, _AUGMENT, _SPLIT, _ITEM, _DRAW, _MIX, _TRANSFORM, _BATCHES, _LAYERS = range(1, 10)


def global_batches(n: int, batch_size: int, seed: int, epoch: int) -> list[Indices]:
    """Shuffle `n` samples and cut them into the global batches of one epoch.

    Args:
        n: samples in the training set.
        batch_size: samples of a global batch, over all ranks; the last batch holds what is left.

    Returns:
        `ceil(n / batch_size)` arrays of sample indices; together they hold every index once.
    """
    order = _shuffled(n, _stream(seed, epoch, _ORDER))
    return _cut(order, batch_size)


def batches_in_order(n: int, batch_size: int) -> list[Indices]:
    """Cut `n` samples into global batches in the order in which they come."""
    return _cut(np.arange(n), batch_size)


def grouped_batches(lengths: Indices, batch_size: int, seed: int, epoch: int) -> list[Indices]:
    """Shuffle samples and cut them into global batches of similar lengths: less of a batch is padding.

    Samples are shuffled, sorted by length within groups of `_GROUPED` batches, cut, and the batches shuffled; the one
    that is not full stays the last.

    Args:
        lengths: of each sample.

    Returns:
        `ceil(n / batch_size)` arrays of sample indices; together they hold every index once.
    """
    n, group = len(lengths), _GROUPED * batch_size
    order = _shuffled(n, _stream(seed, epoch, _ORDER))
    by_length = [chunk[np.argsort(lengths[chunk], kind="stable")] for chunk in _cut(order, group)]
    batches = [batch for chunk in by_length for batch in _cut(chunk, batch_size)]
    full = n // batch_size
    return [batches[i] for i in _shuffled(full, _stream(seed, epoch, _BATCHES))] + batches[full:]


def local_part(batch: Indices, shard: Shard) -> Indices:
    """Return one rank's contiguous part of a global batch; it may be empty.

    Without weights sizes differ by at most 1.

    >>> [local_part(np.arange(5), Shard(rank, 2)).tolist() for rank in range(2)]
    [[0, 1, 2], [3, 4]]
    >>> [local_part(np.arange(5), Shard(rank, 2, (1, 4))).tolist() for rank in range(2)]
    [[0], [1, 2, 3, 4]]
    """
    sizes = share_sizes(len(batch), shard.world_size, shard.weights)
    start = sum(sizes[: shard.rank])
    return batch[start : start + sizes[shard.rank]]


def numbers_in(origin: Indices | None, indices: Indices) -> Indices:
    """Return the numbers that samples have in the data they are a part of; `origin` None: they are all of it."""
    return indices if origin is None else origin[indices]


def split(n: int, holdout: float, seed: int) -> tuple[Indices, Indices]:
    """Split `n` samples into (training, evaluation), each in ascending order; both hold at least one of two samples."""
    order = _shuffled(n, _stream(seed, 0, _SPLIT))
    held = min(max(1, round(n * holdout)), n - 1)
    return np.sort(order[held:]), np.sort(order[:held])


def uniforms(seed: int, epoch: int, indices: Indices, count: int) -> NDArray[np.float64]:
    """Return `(len(indices), count)` numbers in [0, 1): those of one sample depend on (seed, epoch, its index) only."""
    keys = _mix(indices.astype(np.uint64) ^ np.uint64(_stream(seed, epoch, _AUGMENT)))
    draws = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    return _unit(_mix(keys[:, None] + draws))


def item_seeds(seed: int, epoch: int, indices: Indices, transformed: bool = False) -> list[int]:
    """Return one 63-bit seed per sample, for data sets, and transforms, that draw random numbers themselves."""
    stream = np.uint64(_stream(seed, epoch, _TRANSFORM if transformed else _ITEM))
    return [int(s) for s in _mix(indices.astype(np.uint64) ^ stream) >> np.uint64(1)]


def draw_uniforms(seed: int, epoch: int, n: int) -> NDArray[np.float64]:
    """Return a number in [0, 1) for each draw of an epoch with replacement."""
    return _unit(_mix(np.arange(n, dtype=np.uint64) ^ np.uint64(_stream(seed, epoch, _DRAW))))


def mix_seed(seed: int, epoch: int, batch: int) -> int:
    """Return a 32-bit seed of what mixes the samples of a global batch."""
    return _mix_one(batch ^ _stream(seed, epoch, _MIX)) >> 32


def layer_seed(seed: int, step: int, share: int) -> int:
    """Return a 63-bit seed of what layers draw (dropout, drop path) in a step, for one part of its batch."""
    return _mix_one(share ^ _stream(seed, step, _LAYERS)) >> 1


def _unit(hashes: NDArray[np.uint64]) -> NDArray[np.float64]:
    return (hashes >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _cut(order: Indices, size: int) -> list[Indices]:
    return [order[start : start + size] for start in range(0, len(order), size)]


def _shuffled(n: int, stream: int) -> Indices:
    """Order 0..n-1 by hash. The hash is one-to-one, so there are no ties and any sort gives the same order."""
    return np.argsort(_mix(np.arange(n, dtype=np.uint64) ^ np.uint64(stream)))


def _stream(seed: int, epoch: int, purpose: int) -> int:
    key = seed & _MASK
    for word in (epoch, purpose):
        key = _mix_one((key + (word + 1) * _GOLDEN) & _MASK)
    return key


def _mix_one(x: int) -> int:
    """Return what `_mix` makes of one number; arrays of one take ten times as long, and some steps need such a hash."""
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
