"""Batches in memory that the trainer shares with its loader processes."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np
from numpy.typing import NDArray

_PAGE = 4096


class Slots:
    """A fixed number of batch buffers in anonymous shared memory: made before the fork, gone with the processes.

    Args:
        count: buffers.
        rows: samples that each can hold.
        shape: of one input.
        dtype: of the inputs; targets are int64.
    """

    def __init__(self, count: int, rows: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        inputs_bytes = _whole_pages(rows * int(np.prod(shape)) * dtype.itemsize)
        targets_bytes = _whole_pages(rows * 8)
        self.n_bytes = count * (inputs_bytes + targets_bytes)
        self._memory = mmap.mmap(-1, self.n_bytes)
        self._buffers: list[tuple[NDArray[Any], NDArray[np.int64]]] = []
        for i in range(count):
            start = i * (inputs_bytes + targets_bytes)
            inputs = np.frombuffer(self._memory, dtype, rows * int(np.prod(shape)), start).reshape(rows, *shape)
            self._buffers.append((inputs, np.frombuffer(self._memory, np.int64, rows, start + inputs_bytes)))

    def __getitem__(self, slot: int) -> tuple[NDArray[Any], NDArray[np.int64]]:
        """Return the buffers (inputs, targets) of a slot."""
        return self._buffers[slot]

    @property
    def address(self) -> int:
        """Where the memory begins in this process."""
        return int(np.frombuffer(self._memory, np.uint8).ctypes.data)


def _whole_pages(n_bytes: int) -> int:
    return -(-max(1, n_bytes) // _PAGE) * _PAGE
