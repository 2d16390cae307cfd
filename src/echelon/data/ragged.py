"""Samples of different lengths in one block of memory, and batches of them: padded to the longest of a global batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from echelon.tasks import nest
from echelon.tasks.nest import Nest


class RaggedArray:
    """N samples of `(length, ...)`, one after the other.

    Args:
        values: of all samples, `(sum of lengths, ...)`.
        ends: where each sample ends in `values`, `(N,)`, ascending.
        pad: what shorter samples of a batch are filled up with.
    """

    def __init__(self, values: NDArray[Any], ends: NDArray[np.int64], pad: float = 0) -> None:
        self.values, self.pad = values, pad
        self._ends = ends
        self._starts = np.concatenate([np.zeros(1, np.int64), ends[:-1]])
        self.lengths = ends - self._starts
        self.dtype = values.dtype
        self.shape = (len(ends), int(self.lengths.max(initial=1)), *values.shape[1:])

    @classmethod
    def of(cls, samples: Sequence[NDArray[Any]], pad: float = 0) -> RaggedArray:
        """Return arrays `(length, ...)`, at least one, as one block."""
        return cls(np.concatenate(samples), np.cumsum([len(sample) for sample in samples], dtype=np.int64), pad)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int | NDArray[np.int64]) -> NDArray[Any]:
        """Return one sample `(length, ...)`; of several, `(n, length of the longest, ...)`, padded."""
        if not isinstance(index, np.ndarray):
            sample: NDArray[Any] = self.values[self._starts[index] : self._ends[index]]
            return sample
        rows = np.empty((len(index), self.longest(index), *self.values.shape[1:]), self.dtype)
        self.copy(index, rows)
        return rows

    def subset(self, chosen: NDArray[np.int64]) -> RaggedArray:
        """Return some of the samples, by their numbers `(n,)`."""
        blocks = [self.values[:0], *(self[int(i)] for i in chosen)]
        return RaggedArray(np.concatenate(blocks), np.cumsum(self.lengths[chosen]), self.pad)

    def longest(self, indices: NDArray[np.int64]) -> int:
        """Return the length of the longest of some samples, by their numbers `(n,)`, at least 1."""
        return max(1, int(self.lengths[indices].max(initial=1)))

    def copy(self, indices: NDArray[np.int64], rows: NDArray[Any]) -> None:
        """Write samples to `rows` `(n, at least the longest, ...)`, padded at their ends."""
        rows[:] = self.pad
        for row, start, end in zip(rows, self._starts[indices], self._ends[indices], strict=True):
            row[: end - start] = self.values[start:end]


def batch_specs(arrays: Nest, specs: Nest, indices: NDArray[np.int64]) -> Nest:
    """Return specs whose ragged leaves are as long as the longest of the samples `indices` `(n,)`."""

    def fitted(spec: nest.TensorSpec, array: Any) -> nest.TensorSpec:
        """Return the spec of one leaf."""
        if not isinstance(array, RaggedArray):
            return spec
        return replace(spec, shape=(array.longest(indices), *spec.shape[1:]))

    return nest.map_leaves(fitted, specs, arrays)


def sample_lengths(arrays: Nest) -> NDArray[np.int64] | None:
    """Return the length of each sample, of its longest leaf; None where all are of one length."""
    lengths = [array.lengths for array in nest.leaves(arrays) if isinstance(array, RaggedArray)]
    return np.maximum.reduce(lengths) if lengths else None


def padded_lengths(specs: Nest) -> tuple[int, ...]:
    """Return how long the ragged leaves of a batch are."""
    return tuple(spec.shape[0] for spec in nest.leaves(specs) if spec.ragged)


def with_lengths(specs: Nest, lengths: Iterator[int]) -> Nest:
    """Return specs whose ragged leaves have these lengths, in their order (`padded_lengths`)."""
    return nest.map_leaves(
        lambda spec: replace(spec, shape=(next(lengths), *spec.shape[1:])) if spec.ragged else spec, specs
    )


def crop(buffers: Nest, specs: Nest, rows: slice) -> Nest:
    """Return views of some rows of larger buffers, as long as the specs say."""
    return nest.map_leaves(
        lambda buffer, spec: buffer[rows, : spec.shape[0]] if spec.ragged else buffer[rows], buffers, specs
    )
