"""Merges the sealed segments of a record: python -m echelon.records.compact FOLDER PARENT.

The newest segment stays as it was written, so that who follows a record finds what it had not read yet. Of the others
each becomes one of level 1, and eight of a level one of the next. A segment is written under another name, flushed and
renamed; only then those it stands for are removed.
"""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

from echelon.core.files import write_whole
from echelon.records.file import LineReader, restart_steps, to_line
from echelon.records.kinds import Record
from echelon.records.segments import FAN, Segment, all_segments, level_for, segments_of
from echelon.records.thin import thinned

LOCK_FILE = ".record-lock"
_PART_FILE = ".record-part"
_LOWEST_PRIORITY = 19


def compact(folder: Path, parent: int) -> None:
    """Merge what there is to merge, unless another process does it, and as long as `parent` is this one's."""
    fd = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    else:
        _remove_merged(folder)
        while (sources := next(_mergeable(folder), None)) is not None:
            _merge(folder, sources, parent)
            _remove_merged(folder)
    finally:
        os.close(fd)


def _mergeable(folder: Path) -> Iterator[list[Segment]]:
    """Yield segments that become one: first those that were merged before, so that they never wait behind new ones."""
    segments = segments_of(folder)
    for level, same in groupby(segments, key=lambda s: s.level):
        neighbours = list(same)[:FAN]
        if level and len(neighbours) == FAN:
            yield neighbours
    for segment in segments[:-1]:
        if segment.level == 0:
            yield [segment]


def _merge(folder: Path, sources: Sequence[Segment], parent: int) -> None:
    first, last = sources[0], sources[-1]
    level = first.level + 1 if first.level else level_for((folder / first.name).stat().st_size)
    merged = Segment(first.first, last.last, level)
    part = folder / _PART_FILE
    fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    try:
        fan = FAN if first.level else merged.windows
        for record in thinned(_read(folder, sources, parent), merged.windows, fan, restart_steps(folder)):
            write_whole(fd, to_line(record))
        os.fsync(fd)
    finally:
        os.close(fd)
    part.rename(folder / merged.name)


def _read(folder: Path, sources: Sequence[Segment], parent: int) -> Iterator[Record]:
    for segment in sources:
        with (folder / segment.name).open("rb") as file:
            for record in LineReader().read_lines(file, first=segment.first == 1, to_end=True):
                if parent != os.getppid():
                    raise SystemExit  # who asked for it has ended
                yield record


def _remove_merged(folder: Path) -> None:
    """Remove the segments that another stands for."""
    segments = segments_of(folder)
    for segment in all_segments(folder):
        if segment not in segments:
            (folder / segment.name).unlink()


if __name__ == "__main__":
    os.nice(_LOWEST_PRIORITY)
    compact(Path(sys.argv[1]), int(sys.argv[2]))
