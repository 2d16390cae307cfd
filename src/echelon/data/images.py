"""Map-style data sets of labelled images and tensors; items come before any transform."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, Subset

from echelon.core.errors import UserError
from echelon.data.decode import CannotDecode, Picture, as_picture, contents_of, picture_of, rgb_tensor
from echelon.data.labelled_files import FileRanges, LabelledFiles, Labels
from echelon.data.ragged import SampleLengths
from echelon.tasks import nest
from echelon.tasks.nest import Nest

TARGET_KEYS = ("target", "targets", "label", "labels", "y")


class LabelledImages(Dataset[tuple[Tensor, int]], ABC):
    """Images that are decoded when they are asked for, each of a class.

    Attributes:
        labels: of each image, `(N,)`.
    """

    labels: Labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.picture(i).load(1.0), int(self.labels[i])

    @abstractmethod
    def picture(self, i: int) -> Picture:
        """Open image `i`."""

    @abstractmethod
    def path(self, i: int) -> str:
        """Return what image `i` is called in messages."""


class EncodedImages(LabelledImages):
    """Images that lie in image files, whatever these lie in."""

    @abstractmethod
    def contents(self, i: int) -> bytes:
        """Return the file of image `i`.

        Raises:
            CannotDecode: it cannot be read.
        """

    def picture(self, i: int) -> Picture:
        """Open image `i`."""
        return picture_of(self.contents(i))


class ImageFiles(LabelledFiles, EncodedImages):
    """Image files under one folder."""

    @classmethod
    def of(cls, files: LabelledFiles) -> ImageFiles:
        """Return files as images."""
        return cls(files.root, files.names, files.labels)

    def contents(self, i: int) -> bytes:
        """Return the file of image `i`."""
        return contents_of(self.path(i))


class ImageRanges(FileRanges, EncodedImages):
    """Image files that lie within larger files, such as tar shards."""

    def contents(self, i: int) -> bytes:
        """Return the file of image `i`."""
        try:
            return super().contents(i)
        except OSError as error:
            raise CannotDecode(error.strerror or str(error)) from error


@dataclass(frozen=True)
class ImageCells(EncodedImages):
    """Image files in a column of a table.

    Attributes:
        source: what the table is called in messages.
        files: their contents, a column of bytes (`pyarrow.ChunkedArray`); null where the file lies elsewhere.
        paths: of the files, a column of strings.
        rows: of the images in the columns, `(N,)`.
    """

    source: str
    files: Any
    paths: Any
    rows: NDArray[np.int64]
    labels: Labels

    def contents(self, i: int) -> bytes:
        """Return the file of image `i`."""
        row = int(self.rows[i])
        if (content := self.files[row].as_py()) is not None:
            return bytes(content)
        path = self.paths[row].as_py()
        if path is None:
            raise CannotDecode("it is missing")
        return contents_of(path)

    def path(self, i: int) -> str:
        """Return what image `i` is called in messages."""
        return f"{self.source}: row {int(self.rows[i]) + 1}"

    def subset(self, chosen: NDArray[np.int64]) -> ImageCells:
        """Return some of the images, by their numbers `(n,)`."""
        return ImageCells(self.source, self.files, self.paths, self.rows[chosen], self.labels[chosen])


@dataclass(frozen=True)
class ImageArray(Dataset[tuple[Tensor, int]]):
    """Images of one size in memory, `(N, C, H, W)` uint8.

    Attributes:
        origin: numbers of the samples in the data that they are a part of, `(N,)`; None: they are all of it.
    """

    pixels: NDArray[np.uint8]
    labels: Labels
    origin: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return torch.from_numpy(self.pixels[i]), int(self.labels[i])

    def picture(self, i: int) -> Picture:
        """Return image `i`."""
        return as_picture(torch.from_numpy(self.pixels[i]))

    def path(self, i: int) -> str:
        """Return what image `i` is called in messages."""
        return f"image {i if self.origin is None else self.origin[i]}"

    def subset(self, chosen: NDArray[np.int64]) -> ImageArray:
        """Return some of the images, by their numbers `(n,)`."""
        return ImageArray(self.pixels[chosen], self.labels[chosen], chosen)


@dataclass(frozen=True)
class ImageItems(LabelledImages):
    """Another data set whose items are (Pillow image or uint8 tensor `(C, H, W)`, label).

    Attributes:
        origin: numbers of the samples in the data that they are a part of, `(N,)`; None: they are all of it.
        are_fixed: whether an item is the same each time; else it may draw random numbers.
    """

    items: Any
    labels: Labels
    origin: NDArray[np.int64] | None = None
    are_fixed: bool = False

    def picture(self, i: int) -> Picture:
        """Return image `i`."""
        try:
            image = self.items[i][0]
        except Exception as error:
            _name_item(error, i, self.origin)
            raise
        return as_picture(image if isinstance(image, Tensor) else rgb_tensor(image))

    def path(self, i: int) -> str:
        """Return what image `i` is called in messages."""
        return f"item {i if self.origin is None else self.origin[i]}"

    def subset(self, chosen: NDArray[np.int64]) -> ImageItems:
        """Return some of the images, by their numbers `(n,)`."""
        return ImageItems(Subset(self.items, chosen.tolist()), self.labels[chosen], chosen, self.are_fixed)


@dataclass(frozen=True)
class TensorArray(Dataset[tuple[Nest, Nest]]):
    """Inputs and targets of any type in memory, nests of arrays `(N, ...)`, also ragged ones; used as they come.

    Attributes:
        origin: numbers of the samples in the data that they are a part of, `(N,)`; None: they are all of it.
    """

    values: Nest
    targets: Nest
    origin: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return nest.rows(self.values)

    def __getitem__(self, i: int) -> tuple[Nest, Nest]:
        return nest.map_leaves(lambda array: torch.as_tensor(array[i]), (self.values, self.targets))


@dataclass(frozen=True)
class TensorItems(Dataset[tuple[Nest, Nest]]):
    """Another data set, whose items are used as they come: tensors of one shape each, or padded.

    Attributes:
        known_targets: of all items, where somebody has read them already; else None.
        origin: numbers of the samples in the data that they are a part of, `(N,)`; None: they are all of it.
        lengths: where items differ in the length of their first axis; None: they are of one shape.
    """

    items: Any
    known_targets: Nest = None
    origin: NDArray[np.int64] | None = None
    lengths: SampleLengths | None = None

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> tuple[Nest, Nest]:
        try:
            item = self.items[i]
        except Exception as error:
            _name_item(error, i, self.origin)
            raise
        return as_sample(item)


def _name_item(error: Exception, i: int, origin: NDArray[np.int64] | None) -> None:
    """Add to what a caller's data set raised which item it was asked for, unless it was said in words of ours."""
    if not isinstance(error, UserError):
        error.add_note(about_item(error, i if origin is None else int(origin[i])))


def about_item(error: Exception, number: int) -> str:
    """Say which item of the data an error is about, and where a length is to blame."""
    counted = ", which its __len__ counts" if isinstance(error, IndexError) else ""
    return f"item {number} of the data{counted}"


def as_sample(item: Any) -> tuple[Nest, Nest]:
    """Return the inputs and targets of an item, as tensors.

    An item is (input, target), (input, input, ..., target), or a dict with one of `TARGET_KEYS`; inputs and target may
    be nests themselves.

    Raises:
        UserError: it is something else.
    """
    if isinstance(item, Mapping):
        key = next((each for each in TARGET_KEYS if each in item), None)
        if key is None or len(item) < 2:
            raise UserError(f"a dict with keys {', '.join(map(str, item))}: one must be {', '.join(TARGET_KEYS)}")
        of_keys = {name: nest.map_leaves(partial(_as_tensor, key=name), value) for name, value in item.items()}
        wanted = of_keys.pop(key)
        return of_keys, wanted
    elif isinstance(item, (tuple, list)) and len(item) >= 2:
        *several, wanted = item
        given: Nest = tuple(several) if len(several) > 1 else several[0]
    else:
        is_array = isinstance(item, (Tensor, np.ndarray, np.generic))
        hint = "; arrays of inputs and labels are one by TensorDataset(inputs, labels) of torch" if is_array else ""
        raise UserError(
            f"items must be (tensor, label), not {_kinds(item)}: or (input, ..., target), or a dict with a target{hint}"
        )
    return nest.map_leaves(_as_tensor, given), nest.map_leaves(_as_tensor, wanted)


def class_of(name: str, i: int, item: Any) -> int:
    """Return the class number of an item.

    Args:
        name: of the data.
        i: the item's number.

    Raises:
        UserError: its target is no single whole number.
    """
    target = as_sample(item)[1]
    whole = isinstance(target, Tensor) and target.numel() == 1 and not target.is_floating_point()
    if not whole or target.is_complex():
        shown = f"{target.tolist()}" if isinstance(target, Tensor) and target.numel() == 1 else "no single number"
        raise UserError(
            f"data {name}: the target of item {i} is {shown}, and that of item 0 a class number: give whole numbers "
            "as classes, or floats in all items for regression"
        )
    return int(target)


def _as_tensor(value: Any, key: object = None) -> Tensor:
    if not isinstance(value, (Tensor, np.ndarray, np.generic, int, float)):
        hint = ""
        if isinstance(value, str):
            hint = ": number strings, such as by {name: i for i, name in enumerate(sorted(names))}"
        kind = type(value).__name__
        which = f"not of {kind}" if key is None else f"and their {key!r} is of {kind}"
        raise UserError(f"items must be (tensor, label), of tensors, arrays and numbers, {which}{hint}")
    return torch.as_tensor(value)


def _kinds(item: Any) -> str:
    if isinstance(item, (tuple, list)):
        return f"({', '.join(type(part).__name__ for part in item)})"
    return type(item).__name__


Images = ImageFiles | ImageRanges | ImageCells | ImageArray | ImageItems


class RandomState(NamedTuple):
    """State of the generators that a data set may draw from: torch's of the CPU, Python's and numpy's."""

    torch_state: Tensor
    python_state: Any
    numpy_state: Any

    @classmethod
    def now(cls) -> RandomState:
        """Return the state of this process."""
        return cls(torch.default_generator.get_state(), random.getstate(), np.random.get_state())

    @classmethod
    def of(cls, seed: int) -> RandomState:
        """Return the state that a seed gives; that of the process stays."""
        with random_state_kept():
            cls.seed(seed)
            return cls.now()

    @classmethod
    def seed(cls, seed: int) -> RandomState:
        """Seed the process, within `random_state_kept`; returns the state."""
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        return cls.now()

    def is_same(self, other: RandomState) -> bool:
        """Whether two states give the same numbers."""
        mine, theirs = self.numpy_state, other.numpy_state
        return (
            self.python_state == other.python_state
            and mine[2] == theirs[2]
            and np.array_equal(mine[1], theirs[1])
            and torch.equal(self.torch_state, other.torch_state)
        )

    def put_back(self) -> None:
        """Give the process this state."""
        torch.default_generator.set_state(self.torch_state)
        random.setstate(self.python_state)
        np.random.set_state(self.numpy_state)


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Give the process its random state back after a data set drew from it."""
    kept = RandomState.now()
    try:
        yield
    finally:
        kept.put_back()


def labels_of(data: Any) -> Labels | None:
    """Return a data set's labels where it keeps them, without reading its items."""
    for attribute in ("targets", "labels", "_labels"):
        if (found := getattr(data, attribute, None)) is not None:
            labels = np.asarray(found)
            return labels.astype(np.int64) if labels.ndim == 1 and labels.dtype.kind in "iub" else None
    if (samples := getattr(data, "_samples", None)) is not None:
        return np.asarray([label for _, label in samples], dtype=np.int64)
    return None
