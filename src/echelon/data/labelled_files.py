"""Many files, each of a class: under one folder, or within larger files such as tar shards."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from typing import Self

import numpy as np
from numpy.typing import NDArray

from echelon.core.errors import UserError

Labels = NDArray[np.int64]
_MOST_OPEN = 128


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
class LabelledFiles:
    """Files under one folder, each of a class."""

    root: str
    names: FileNames
    labels: Labels

    def __len__(self) -> int:
        return len(self.labels)

    def path(self, i: int) -> str:
        """Return where file `i` lies."""
        return os.path.join(self.root, self.names[i])  # noqa: PTH118 - a Path for each image costs 10 us

    def opened(self, i: int) -> str | BytesIO:
        """Return file `i` as libraries read it: its path."""
        return self.path(i)

    def subset(self, chosen: NDArray[np.int64]) -> Self:
        """Return some of the files, by their numbers `(n,)`."""
        return type(self)(self.root, FileNames([self.names[i] for i in chosen]), self.labels[chosen])


class OpenFiles:
    """Some large files, opened as they are read.

    Reads move no position in a file, so processes that are forked later share those that are open. Threads may read.
    """

    def __init__(self, paths: Sequence[str], sizes: Sequence[int]) -> None:
        """Open none yet.

        Args:
            sizes: of the files in bytes, when what lies where was found out.
        """
        self.paths, self._sizes = paths, sizes
        self._open: dict[int, int] = {}
        self._turn = threading.Lock()  # a file that one thread reads is not closed by another
        weakref.finalize(self, _close_all, self._open)

    def read(self, file: int, offset: int, size: int) -> bytes:
        """Return a range of bytes; fewer where the file ends.

        Raises:
            UserError: the file is of another size than it was.
            OSError: it cannot be read.
        """
        with self._turn:
            return os.pread(self._descriptor(file), size, offset)

    def __reduce__(self) -> tuple[type[OpenFiles], tuple[Sequence[str], Sequence[int]]]:
        return OpenFiles, (self.paths, self._sizes)

    def _descriptor(self, file: int) -> int:
        if file not in self._open:
            if len(self._open) >= _MOST_OPEN:
                os.close(self._open.pop(next(iter(self._open))))
            self._open[file] = os.open(self.paths[file], os.O_RDONLY | os.O_CLOEXEC)
            if os.fstat(self._open[file]).st_size != self._sizes[file]:
                raise UserError(f"data {self.paths[file]}: it changed while the run reads it: start or resume again")
        return self._open[file]


def _close_all(descriptors: dict[int, int]) -> None:
    for descriptor in descriptors.values():
        os.close(descriptor)
    descriptors.clear()


@dataclass(frozen=True)
class FileRanges:
    """Files that lie within larger files, such as tar shards.

    Attributes:
        names: of the files within theirs.
        file: in which each lies, `(N,)`, by its place in `files`.
        offset, size: of each in bytes, `(N,)`.
    """

    files: OpenFiles
    names: FileNames
    file: NDArray[np.int64]
    offset: NDArray[np.int64]
    size: NDArray[np.int64]
    labels: Labels

    def __len__(self) -> int:
        return len(self.labels)

    def contents(self, i: int) -> bytes:
        """Return what file `i` holds.

        Raises:
            OSError: it cannot be read.
        """
        return self.files.read(int(self.file[i]), int(self.offset[i]), int(self.size[i]))

    def opened(self, i: int) -> str | BytesIO:
        """Return file `i` as libraries read it: a stream of its bytes."""
        return BytesIO(self.contents(i))

    def path(self, i: int) -> str:
        """Return what file `i` is called in messages."""
        return f"{self.files.paths[self.file[i]]}: {self.names[i]}"

    def subset(self, chosen: NDArray[np.int64]) -> Self:
        """Return some of the files, by their numbers `(n,)`."""
        names = FileNames([self.names[i] for i in chosen])
        rows = (each[chosen] for each in (self.file, self.offset, self.size, self.labels))
        return type(self)(self.files, names, *rows)


AnyFiles = LabelledFiles | FileRanges
