"""Data that can only be iterated, in the order in which it comes: each rank reads through it and keeps its part.

Sample i is the i-th that an iteration gives, so the batches of an epoch are the same on every number of ranks, and a
resume reads on to where the run was. That each sample is trained on exactly once holds as far as two iterations give
the same: random numbers that the data draws from torch, numpy or `random` are seeded by (seed, epoch); whatever else
changes between iterations, such as files or a network's answers, holds within a process alone.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from echelon.core.errors import UserError
from echelon.data.images import RandomState, as_sample, class_of, random_state_kept
from echelon.data.labelled_files import Labels
from echelon.data.order import item_seeds
from echelon.tasks import nest

_COUNTING_S = 600.0
_END = object()


class Stream:
    """An iterable as samples by their place; one place after the other is what it is fast at.

    Attributes:
        labels: class numbers of all samples, where their targets are classes; else None.
        shapes: of the tensors of items, each once, of all items where these were read through.
    """

    def __init__(self, data: Any, part: str) -> None:
        """Take an iterable that can be iterated again; without a length, or with classes, it is read through once.

        Args:
            part: what it is called in messages, such as `training`.

        Raises:
            UserError: it can be iterated once alone, is empty, has no end, or fewer items than its length says.
        """
        self._data, self._name = data, f"data {type(data).__name__}: the {part} data"
        if isinstance(data, DataLoader):
            raise UserError(f"{self._name} is a DataLoader, which gives batches: give the data set that it reads")
        if iter(data) is data:
            raise UserError(
                f"{self._name} can be iterated just once: give an object whose __iter__ begins anew for each epoch, "
                "such as a torch IterableDataset, or a list"
            )
        self._seed = self._epoch = self._next = 0
        self._iterator: Iterator[Any] | None = None
        self._item: Any = None
        self._random = RandomState.now()
        self._restart()
        self.labels: Labels | None = None
        self._count = len(data) if hasattr(data, "__len__") else -1
        self._first = as_sample(self[0])
        self.shapes: set[tuple[tuple[int, ...], ...]] = set()
        target = self._first[1]
        has_classes = isinstance(target, torch.Tensor) and target.ndim == 0 and not target.is_floating_point()
        if has_classes or self._count < 0:
            self._read_through(has_classes)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: int) -> Any:
        """Return an item, reading on to it; one that lies behind is reached from the beginning.

        Raises:
            UserError: the data ends before it.
        """
        if place == self._next - 1:
            return self._item
        if place < self._next or self._iterator is None:
            self._restart()
        with random_state_kept():
            self._random.put_back()
            while self._next <= place:
                item = self._following()
                if item is _END:
                    raise UserError(
                        f"{self._name} ends after {self._next} items"
                        + (f", and its length is {self._count}" if self._count > 0 else ": it is empty")
                    )
                self._item = item
                self._next += 1
            self._random = RandomState.now()
        return self._item

    def begin(self, seed: int, epoch: int) -> None:
        """Iterate with the random numbers of an epoch, from its beginning unless it has begun already."""
        if (seed, epoch) != (self._seed, self._epoch):
            self._seed, self._epoch = seed, epoch
            self._restart()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_iterator": None, "_item": None}  # an iteration cannot be sent

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._restart()

    def _following(self) -> Any:
        if self._iterator is None:  # the first item begins the iteration, with the epoch's random numbers
            if hasattr(self._data, "set_epoch"):
                self._data.set_epoch(self._epoch)
            self._iterator = iter(self._data)
        return next(self._iterator, _END)

    def _restart(self) -> None:
        self._iterator, self._next, self._item = None, 0, None
        (seed,) = item_seeds(self._seed, self._epoch, np.zeros(1, np.int64))
        self._random = RandomState.of(seed)

    def _read_through(self, has_classes: bool) -> None:
        """Count the items, and note their classes."""
        labels: list[int] = []
        ends, known, count = time.monotonic() + _COUNTING_S, self._count, 0
        self._count = max(known, 0)
        while known < 0 or count < known:
            try:
                item = self[count]
            except UserError:
                if known >= 0 or not count:
                    raise
                break
            count += 1
            self._note_shapes(item)
            if has_classes:
                labels.append(class_of(type(self._data).__name__, count - 1, item))
            if time.monotonic() > ends:
                raise UserError(
                    f"{self._name} gave {count} items in {_COUNTING_S / 60:g} minutes and has no end yet: give it "
                    "__len__, the number of items of an epoch"
                )
        self._count = count
        self.labels = np.array(labels, dtype=np.int64) if has_classes else None

    def _note_shapes(self, item: Any) -> None:
        """Note the shapes of an item's tensors; one with other tensors is refused where it is used."""
        try:
            leaves = nest.leaves_as(self._first, as_sample(item))
        except ValueError:
            return
        self.shapes.add(tuple(tuple(leaf.shape) for leaf in leaves))


def is_stream(data: Any) -> bool:
    """Whether data can only be iterated."""
    return isinstance(data, IterableDataset) or (hasattr(data, "__iter__") and not hasattr(data, "__getitem__"))
