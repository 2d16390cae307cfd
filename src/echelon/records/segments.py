"""The files of a record: `record.jsonl`, to which writers append, and older segments beside it.

A segment `record-000001-000008-2.jsonl` holds what was sealed first to eighth, thinned to level 2 (0: as written). A
segment of a higher level stands for those of its numbers that still lie beside it, so that what was merged and what it
was merged from are never both read, whenever a process that merges them is killed.
"""

from __future__ import annotations

import math
import os
import re
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from echelon.core.files import open_plain

RECORD_FILE = "record.jsonl"
SEGMENT_BYTES = 8 << 20
FAN = 8
"""So many windows, and so many segments, become one at the next level."""

_NAME = re.compile(r"record-(\d{6,})-(\d{6,})-(\d+)\.jsonl")
_STEADY_S = 2.0  # for which a reader waits until the files fit together
_POLL_S = 0.01
_BEGINNING_BYTES = 64
_BUFFER_BYTES = 256 << 10  # a line has some kB


@dataclass(frozen=True, order=True)
class Segment:
    """What was sealed as number `first` to `last`, thinned to a level."""

    first: int
    last: int
    level: int

    @property
    def name(self) -> str:
        """Of its file."""
        return f"record-{self.first:06d}-{self.last:06d}-{self.level}.jsonl"

    @property
    def windows(self) -> int:
        """At most so many windows are one line of it."""
        return FAN**self.level

    def stands_for(self, other: Segment) -> bool:
        """Whether it holds what another one does."""
        return self.first <= other.first and other.last <= self.last and self.level > other.level


@dataclass(frozen=True)
class OpenFile:
    """A file of a record, open for reading; `segment` is None for `record.jsonl`. Only the oldest is `first`."""

    segment: Segment | None
    file: BinaryIO
    first: bool

    @property
    def file_id(self) -> int:
        """What tells it apart from others, whatever its name, while it is open: later its number may be another's."""
        return os.fstat(self.file.fileno()).st_ino

    @property
    def beginning(self) -> bytes:
        """Its first bytes, which no other file of the record has: each begins with a moment of its own."""
        return os.pread(self.file.fileno(), _BEGINNING_BYTES, 0)

    @property
    def size(self) -> int:
        """Bytes in it now."""
        return os.fstat(self.file.fileno()).st_size


def all_segments(folder: Path) -> list[Segment]:
    """Return the segments in a folder, the oldest first, those included that another stands for."""
    try:
        names = [_NAME.fullmatch(entry.name) for entry in os.scandir(folder)]
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(Segment(int(m[1]), int(m[2]), int(m[3])) for m in names if m)


def segments_of(folder: Path) -> list[Segment]:
    """Return the segments that a reader reads, the oldest first."""
    segments = all_segments(folder)
    return [s for s in segments if not any(other.stands_for(s) for other in segments)]


def level_for(n_bytes: int) -> int:
    """Return the level at which a segment as written, of so many bytes, becomes one of the usual size."""
    return max(1, math.ceil(math.log(max(n_bytes, 1) / SEGMENT_BYTES, FAN)))


@contextmanager
def open_record(folder: Path) -> Iterator[list[OpenFile]]:
    """Open all files of a record, the oldest first; none where nothing was recorded.

    While it is sealed and merged, files change their names: what does not fit together is opened again. Where a
    segment stays away, for somebody removed it, the others are read.
    """
    deadline_s = time.monotonic() + _STEADY_S
    while True:
        with ExitStack() as stack:
            files, fit = _try_open(folder, stack)
            if fit or time.monotonic() > deadline_s:
                yield files
                return
        time.sleep(_POLL_S)


def _try_open(folder: Path, stack: ExitStack) -> tuple[list[OpenFile], bool]:
    """Open what is there; returns the files, and whether they fit together."""
    newest = _open(folder / RECORD_FILE, stack)  # first: what is sealed from now on is among the segments
    segments = segments_of(folder)
    opened: list[tuple[Segment | None, BinaryIO | None]] = [(s, _open(folder / s.name, stack)) for s in segments]
    fit = _in_row(segments) and all(file for _, file in opened)
    if newest is not None:
        fit = fit and _same_file(newest, folder / RECORD_FILE)
        opened.append((None, newest))
    present = [(segment, file) for segment, file in opened if file]
    return [OpenFile(segment, file, i == 0) for i, (segment, file) in enumerate(present)], fit


def _open(path: Path, stack: ExitStack) -> BinaryIO | None:
    try:
        return stack.enter_context(open_plain(path, _BUFFER_BYTES))
    except FileNotFoundError:
        return None


def _in_row(segments: Sequence[Segment]) -> bool:
    """Whether each segment begins where the one before ends, from the first one ever sealed."""
    reached = 0
    for segment in segments:
        if segment.first != reached + 1:
            return False
        reached = segment.last
    return True


def _same_file(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False
