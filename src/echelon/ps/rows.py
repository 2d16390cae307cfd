"""Rows of embedding tables on servers: what travels of a table are rows, each an index and its values.

A key of a table holds a range of its rows. A worker pulls the rows that its batch looks up and pushes the gradients of
those alone; how often each row was updated is counted, and staleness is a row's own:

    staleness[r] = updates[r] now - updates[r] when this worker pulled r
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from echelon.ps.blob import as_frame, read_frame
from echelon.ps.made_rows import RowSlots
from echelon.ps.table import KeyRange

_INT32_ROWS = 2**31 - 1


def index_frame(rows: Tensor, key: KeyRange) -> Any:
    """Return the frame of row numbers within a key, `(R,)`: int32, or int64 where the key has more."""
    return as_frame(rows.to(_index_dtype(key)).contiguous()) if len(rows) else b""


def value_frame(values: Tensor) -> Any:
    """Return the frame of rows' values, `(R, D)`; they must not change until it was sent."""
    return as_frame(values.contiguous()) if values.numel() else b""


def read_rows(frame: Any, key: KeyRange) -> Tensor:
    """Read row numbers within a key, `(R,)` int64.

    Raises:
        ValueError: they are not ascending rows of the key, each once.
    """
    if not len(frame):
        return torch.zeros(0, dtype=torch.int64)
    rows = read_frame(frame, _index_dtype(key)).to(torch.int64)
    if int(rows[0]) < 0 or int(rows[-1]) >= key.rows or not bool((rows.diff() > 0).all()):
        raise ValueError(f"not ascending rows of key {key.index}, which has {key.rows}")
    return rows


def read_values(frame: Any, count: int, key: KeyRange, dtype: torch.dtype) -> Tensor:
    """Read the values of so many rows, `(R, D)`; they share the frame's memory.

    Raises:
        ValueError: they are of another number of rows.
    """
    flat = read_frame(frame, dtype) if len(frame) else torch.zeros(0, dtype=dtype)
    if flat.numel() != count * key.width:
        raise ValueError(f"{flat.numel()} elements for {count} rows of key {key.index}")
    return flat.view(count, key.width)


def row_gradient(rows: Tensor, values: Tensor, key: KeyRange) -> Tensor:
    """Return the sparse gradient of a key, `(rows of the key, D)`, from rows `(R,)` and their values `(R, D)`."""
    shape = (key.rows, key.width)
    return torch.sparse_coo_tensor(rows[None], values, shape, is_coalesced=True, check_invariants=False)


def of_keys(keys: Sequence[KeyRange], rows: Tensor) -> Iterator[tuple[KeyRange, int, Tensor]]:
    """Divide ascending rows `(R,)` of a table among its keys: each key, its first row, and its rows by number in it."""
    first = 0
    for key in keys:
        low, high = torch.searchsorted(rows, torch.tensor([first, first + key.rows])).tolist()
        yield key, first, rows[low:high] - first
        first += key.rows


def _index_dtype(key: KeyRange) -> torch.dtype:
    return torch.int32 if key.rows <= _INT32_ROWS else torch.int64


class RowVersions:
    """Counts the updates of each row of a key, and knows which of them each worker's pulled rows have.

    Attributes:
        counts: updates of each row, `(rows of the key,)` int32; of rows that are made one by one, of each slot.
    """

    def __init__(self, rows: int, slots: RowSlots | None = None) -> None:
        """Count nothing yet; `slots`: of rows that are made one by one."""
        self.counts = torch.zeros(0 if slots is not None else rows, dtype=torch.int32)
        self._slots = slots
        self._pulled: dict[str, tuple[int, Tensor, Tensor]] = {}

    def of(self, rows: Tensor) -> Tensor:
        """Return the updates of some rows, `(R,)`; a row that was not made has none."""
        if self._slots is None:
            return self.counts[rows]
        self._make_room()
        slots = self._slots.find(rows)
        counts = torch.zeros(len(rows), dtype=torch.int32)
        counts[slots >= 0] = self.counts[slots[slots >= 0]]
        return counts

    def _make_room(self) -> None:
        if self._slots is not None and len(self.counts) < self._slots.count:
            more = torch.zeros(self._slots.count - len(self.counts), dtype=torch.int32)
            self.counts = torch.cat([self.counts, more])

    def note_pull(self, worker: str, task: int, rows: Tensor) -> None:
        """Remember what a worker has now of some rows, `(R,)`, beside those that it pulled for the same task."""
        had = self._pulled.get(worker)
        counts = self.of(rows)
        if had is not None and had[0] == task:
            rows, counts = torch.cat([had[1], rows]), torch.cat([had[2], counts])
            rows, order = rows.sort(stable=True)
            counts = counts[order]
        self._pulled[worker] = (task, rows, counts)

    def staleness(self, worker: str, task: int, rows: Tensor) -> Tensor:
        """Return how many updates came to each row since a worker pulled it for a task, `(R,)`.

        0 where that is not known: a server that came back has forgotten what was pulled.
        """
        had = self._pulled.get(worker)
        if had is None or had[0] != task or not len(had[1]):
            return torch.zeros(len(rows), dtype=torch.int32)
        at = torch.searchsorted(had[1], rows).clamp(max=len(had[1]) - 1)
        return torch.where(had[1][at] == rows, self.of(rows) - had[2][at], 0)

    def updated(self, rows: Tensor) -> None:
        """Count an update of some rows, `(R,)`, each once; they were made."""
        self._make_room()
        self.counts[rows if self._slots is None else self._slots.find(rows)] += 1

    def load(self, slots: slice, counts: Tensor | None) -> None:
        """Take over the updates, `(R,)`, of rows that were made just now; None: they had none."""
        self._make_room()
        if counts is not None:
            self.counts[slots] = counts

    def forget(self, worker: str) -> None:
        """Drop what is remembered of a worker that is gone."""
        self._pulled.pop(worker, None)
