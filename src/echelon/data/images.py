"""Map-style data sets of labelled images and tensors; items come before any transform."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from echelon.data.decode import Picture, as_picture, open_picture, rgb_tensor

Labels = NDArray[np.int64]


class FileNames:
    """Many file names in one block of bytes: a million strings would be copied in every loader by their counters."""

    def __init__(self, names: Sequence[str]) -> None:
        encoded = [os.fsencode(name) for name in names]
        self._bytes = b"".join(encoded)
        self._ends = np.cumsum([len(name) for name in encoded], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, i: int) -> str:
        return os.fsdecode(self._bytes[self._ends[i - 1] if i else 0 : self._ends[i]])


@dataclass(frozen=True)
class ImageFiles(Dataset[tuple[Tensor, int]]):
    """Image files under one folder."""

    root: str
    names: FileNames
    labels: Labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.picture(i).load(1.0), int(self.labels[i])

    def picture(self, i: int) -> Picture:
        """Open image `i`."""
        return open_picture(self.path(i))

    def path(self, i: int) -> str:
        """Return where image `i` lies."""
        return os.path.join(self.root, self.names[i])  # noqa: PTH118 - a Path for each image costs 10 us

    def subset(self, chosen: NDArray[np.int64]) -> ImageFiles:
        """Return a data set of some of the images."""
        return ImageFiles(self.root, FileNames([self.names[i] for i in chosen]), self.labels[chosen])


@dataclass(frozen=True)
class ImageArray(Dataset[tuple[Tensor, int]]):
    """Images of one size in memory, `(N, C, H, W)` uint8."""

    pixels: NDArray[np.uint8]
    labels: Labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return torch.from_numpy(self.pixels[i]), int(self.labels[i])

    def picture(self, i: int) -> Picture:
        """Return image `i`."""
        return as_picture(torch.from_numpy(self.pixels[i]))

    def path(self, i: int) -> str:
        """Return what image `i` is called in messages."""
        return f"image {i}"


@dataclass(frozen=True)
class ImageItems(Dataset[tuple[Tensor, int]]):
    """Another data set whose items are (Pillow image or uint8 tensor `(C, H, W)`, label)."""

    items: Any
    labels: Labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.picture(i).load(1.0), int(self.labels[i])

    def picture(self, i: int) -> Picture:
        """Return image `i`."""
        image = self.items[i][0]
        return as_picture(image if isinstance(image, Tensor) else rgb_tensor(image))

    def path(self, i: int) -> str:
        """Return what image `i` is called in messages."""
        return f"item {i}"


@dataclass(frozen=True)
class TensorArray(Dataset[tuple[Tensor, int]]):
    """Inputs of any type in memory, `(N, ...)`; used as they come."""

    values: NDArray[Any]
    labels: Labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return torch.from_numpy(self.values)[i], int(self.labels[i])


@dataclass(frozen=True)
class TensorItems(Dataset[tuple[Tensor, int]]):
    """Another data set whose items are (tensor of any type and one shape, label); used as they come."""

    items: Any
    labels: Labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        value, label = self.items[i]
        return torch.as_tensor(value), int(label)


Images = ImageFiles | ImageArray | ImageItems


@contextmanager
def random_state_kept() -> Iterator[None]:
    """Give the process its random state back after a data set drew from it."""
    torch_state, state, numpy_state = torch.default_generator.get_state(), random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        torch.default_generator.set_state(torch_state)
        random.setstate(state)
        np.random.set_state(numpy_state)
