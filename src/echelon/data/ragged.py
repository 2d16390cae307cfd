"""Samples of different lengths in one block of memory, and batches of them: padded to the longest of a global batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.utils.rnn import pad_sequence

from echelon.core.errors import UserError
from echelon.tasks import nest
from echelon.tasks.base import NO_TARGET
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


@dataclass(frozen=True)
class SampleLengths:
    """What is known of samples whose tensors differ in the length of their first axis.

    Leaves are those of inputs, then those of targets.

    Attributes:
        longest: how long each leaf is at most, as far as it is known; None: all samples have one shape.
        pads: what each leaf is filled up with at its end.
        known: at most how long the leaves that differ are, `(N, such leaves)`; None: data that can only be iterated
            tells as it is read.
        tells: whether an input says where a sample ends: a mask of ones, or its length.
    """

    longest: tuple[int | None, ...]
    pads: tuple[float, ...]
    known: NDArray[np.int64] | None
    tells: bool

    def fitted(self, specs: Nest) -> Nest:
        """Return the specs of one sample's inputs and targets with leaves that differ in length as ragged ones."""
        ragged = [
            spec if most is None else replace(spec, shape=(max(1, most), *spec.shape[1:]), ragged=True)
            for spec, most in zip(nest.leaves(specs), self.longest, strict=True)
        ]
        return nest.rebuild(specs, iter(ragged))

    def of_samples(self) -> NDArray[np.int64] | None:
        """Return the length of each sample's longest tensor, `(N,)`; None: unknown."""
        return None if self.known is None else self.known.max(1)

    def of_batch(self, indices: NDArray[np.int64]) -> Iterator[int]:
        """Return how long each leaf that differs is in a batch of samples `(n,)`, at least 1."""
        assert self.known is not None
        return iter(self.known[indices].max(0, initial=1).tolist())

    def differing(self, leaves: Sequence[Any]) -> list[int]:
        """Return the lengths of those of a sample's leaves that differ between samples."""
        return [len(leaf) for leaf, most in zip(leaves, self.longest, strict=True) if most is not None]

    def check(self, number: int, index: int, leaves: Sequence[Any]) -> None:
        """Refuse a sample that is longer than was known, by which batches were made.

        Args:
            number: of the sample in the user's data.
            index: among those that lengths are known of.

        Raises:
            UserError: it is.
        """
        if self.known is None:
            return
        for length, most in zip(self.differing(leaves), self.known[index].tolist(), strict=True):
            if length > most:
                raise UserError(not_known(f"item {number} of the data", length, most))

    def stacked(self, samples: Sequence[tuple[Nest, Nest]]) -> tuple[Nest, Nest]:
        """Return samples' inputs and targets as tensors `(n, ...)`, padded to the longest."""
        columns = zip(*(nest.leaves(sample) for sample in samples), strict=True)
        rows = [
            torch.stack(column) if most is None else pad_sequence(list(column), batch_first=True, padding_value=pad)
            for column, most, pad in zip(columns, self.longest, self.pads, strict=True)
        ]
        batch: tuple[Nest, Nest] = nest.rebuild(samples[0], iter(rows))
        return batch

    def note(self) -> str:
        """Say how batches of these samples come about, and whether a model can know where a sample ends."""
        of_samples = self.of_samples()
        reach = "differ in length" if of_samples is None else f"are {of_samples.min()} to {of_samples.max()} long"
        grouped = "" if of_samples is None else " and holds samples of similar lengths"
        said = f"samples {reach}: a batch is padded to its longest{grouped}; inputs with 0, targets with {NO_TARGET}"
        if self.tells:
            return said
        return (
            f"{said}. No input says where a sample ends: if the model must know, give items one more, a mask "
            "(torch.ones(len(x)), padded with 0) or the length"
        )


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


def not_known(what: str, length: int, known: int) -> str:
    """Say what to do where a sample's length is none that is known before."""
    return (
        f"{what} is {length} long, and {known} long where lengths were known: lengths that are drawn at random, or "
        "change, need `lengths` in the data set: at most how long each item is"
    )
