"""Batches in memory that the trainer shares with its loader processes."""

from __future__ import annotations

import math
import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

from echelon.tasks import nest
from echelon.tasks.nest import Nest, TensorSpec

_PAGE = 4096


class Slots:
    """A fixed number of batch buffers in anonymous shared memory: made before the fork, gone with the processes.

    Args:
        count: buffers.
        rows: samples that each can hold.
        specs: of the arrays of a batch.
    """

    def __init__(self, count: int, rows: int, specs: Nest) -> None:
        sizes = [_whole_pages(_numel(rows, spec) * np.dtype(spec.dtype).itemsize) for spec in nest.leaves(specs)]
        self.n_bytes = count * sum(sizes)
        self._memory = mmap.mmap(-1, self.n_bytes)
        self._buffers: list[Nest] = []
        start = 0
        for _ in range(count):
            arrays = []
            for spec, size in zip(nest.leaves(specs), sizes, strict=True):
                arrays.append(_array(self._memory, start, rows, spec))
                start += size
            self._buffers.append(nest.rebuild(specs, iter(arrays)))

    def __getitem__(self, slot: int) -> Nest:
        """Return the buffers of a slot, `(rows, ...)` each."""
        return self._buffers[slot]

    @property
    def address(self) -> int:
        """Where the memory begins in this process."""
        return int(np.frombuffer(self._memory, np.uint8).ctypes.data)


def _array(memory: mmap.mmap, start: int, rows: int, spec: TensorSpec) -> NDArray[Any]:
    return np.frombuffer(memory, spec.dtype, _numel(rows, spec), start).reshape(rows, *spec.shape)


def _numel(rows: int, spec: TensorSpec) -> int:
    return rows * math.prod(spec.shape)


def _whole_pages(n_bytes: int) -> int:
    return -(-max(1, n_bytes) // _PAGE) * _PAGE
