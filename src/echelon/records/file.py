"""The record of a run, `record.jsonl`: one JSON object a line, appended by rank 0 and the launcher, read by all else.

Each line is one `write` to a file opened for appending, so writers do not tear each other's lines; a reader skips a
last line that a crash cut off.
"""

from __future__ import annotations

import json
import math
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from pydantic_core import from_json

from echelon.core.files import write_whole
from echelon.records import kinds
from echelon.records.decode import decode, number
from echelon.records.events import EVENTS, Event
from echelon.records.kinds import PipelineAction, Record, Start

RECORD_FILE = "record.jsonl"

KINDS: dict[str, type[Record]] = {
    record.kind: record
    for record in vars(kinds).values()
    if isinstance(record, type) and issubclass(record, Record) and record.kind
}
"""The types of lines by their kind; events are told apart by their name."""

_EVENTS: dict[str, type[Event]] = {event().name: event for event in EVENTS}

_HEAD = re.compile(rb'\{"t": [^,"]*, "kind": "([^"\\]*)"')  # as `Recorder` begins a line
_BLOCK_BYTES = 1 << 20

R = TypeVar("R", bound=Record)


def _plain(value: Any) -> Any:
    if isinstance(value, PipelineAction):
        return value.row()
    return vars(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


_ENCODER = json.JSONEncoder(allow_nan=True, default=_plain)  # `json.dumps` with such settings would make one a line


class Recorder:
    """Append records to `record.jsonl` in a run's folder; a recorder without a folder drops them (ranks above 0)."""

    def __init__(self, folder: Path | None) -> None:
        self._fd: int | None = None
        if folder is not None:
            self._fd = os.open(folder / RECORD_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            _end_torn_line(folder / RECORD_FILE, self._fd)

    def write(self, record: Record) -> None:
        """Append a record, with the present time as its `t`."""
        if self._fd is None:
            return
        values = {"t": math.nan, "kind": record.kind, **vars(record)}
        values["t"] = round(time.time(), 6)
        write_whole(self._fd, _ENCODER.encode(values).encode() + b"\n")

    def close(self) -> None:
        """Close the file; later writes are an error."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


def _end_torn_line(path: Path, fd: int) -> None:
    size = os.fstat(fd).st_size
    if size:
        with path.open("rb") as file:
            file.seek(size - 1)
            if file.read(1) != b"\n":
                os.write(fd, b"\n")


class RecordReader:
    """Reads what was added to a folder's record since the last time.

    Attributes:
        lines: that were read so far, those left out included.
        torn: lines that are no JSON objects with a kind.
        unreadable: lines that are not what their kind needs.
    """

    def __init__(self, folder: Path, only: tuple[type[Record], ...] = ()) -> None:
        """Read a folder's record; `only` some types of lines, whose subclasses count, or all."""
        self._path, self._only = folder / RECORD_FILE, only
        self._kinds = {record.kind for record in only}
        self._offset = self._file_id = 0
        self._begin()

    def _begin(self) -> None:
        self._offset = self.lines = self.torn = self.unreadable = 0

    def read(self, to_end: bool = False) -> tuple[bool, list[Record]]:
        """Return whether the file is another one than before (read from its beginning), and the records added.

        A last line without its end is left for the next time, unless it is read `to_end`. Kinds that are unknown here
        are left out.
        """
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            replaced = self._offset > 0
            self._begin()
            self._file_id = 0
            return replaced, []
        with file:
            status = os.fstat(file.fileno())  # of what is open, whatever has the name by now
            replaced = self._file_id not in (0, status.st_ino) or status.st_size < self._offset
            if replaced:
                self._begin()
            self._file_id = status.st_ino
            file.seek(self._offset)
            return replaced, [record for line in self._whole_lines(file, to_end) if (record := self._read(line))]

    def _whole_lines(self, file: BinaryIO, to_end: bool) -> Iterator[bytes]:
        for line in file:
            if not line.endswith(b"\n") and not to_end:
                return
            self._offset += len(line)
            if line.strip():
                self.lines += 1
                yield line

    def _read(self, line: bytes) -> Record | None:
        if _is_other(line, self._kinds):
            return None
        values = _values(line)
        if values is None:
            self.torn += 1
            return None
        if self._only and values["kind"] not in self._kinds:
            return None
        try:
            record = _record_of(values)
        except (KeyError, TypeError, ValueError, AttributeError):
            self.unreadable += 1
            return None
        return record if record is None or not self._only or isinstance(record, self._only) else None


def _is_other(line: bytes, kinds: set[str]) -> bool:
    """Whether the first words of a line say that it is none of some kinds; the line need not be read then."""
    head = _HEAD.match(line) if kinds else None
    return head is not None and head[1].decode(errors="replace") not in kinds


def _values(line: bytes) -> dict[str, Any] | None:
    """Return the object of a line; None: it is none with a kind."""
    try:
        values = from_json(line)  # seven times as fast as `json`, which knows lone surrogates
    except ValueError:
        try:
            values = json.loads(line)
        except ValueError:
            return None
    return values if isinstance(values, dict) and isinstance(values.get("kind"), str) else None


def _record_of(values: Mapping[str, Any]) -> Record | None:
    """Return the record of a line; None for a kind that is unknown here."""
    record_type = KINDS.get(values["kind"])
    if values["kind"] == Event.kind:
        record_type = _EVENTS.get(values["name"], Event)
    if record_type is None:
        return None
    number(values["t"])
    if record_type is Start:
        values = {"version": 0, **values}
    return decode(record_type, values).checked()


def read_records(folder: Path, *only: type[R]) -> list[R]:
    """Read a run's records in the order written; what is torn, strange or of an unknown kind is left out.

    Args:
        only: the types of lines wanted; none: all.
    """
    records: list[Any] = RecordReader(folder, only).read(to_end=True)[1]
    return records


def newest(folder: Path, *only: type[R]) -> Iterator[R]:
    """Yield the records of some types, the last one first, without reading more of the file than is asked for.

    What is torn, strange or of an unknown kind is left out.
    """
    wanted = {record.kind for record in only}
    try:
        file = (folder / RECORD_FILE).open("rb")
    except FileNotFoundError:
        return
    with file:
        for line in _backward(file):
            values = None if _is_other(line, wanted) else _values(line)
            if values is None or values["kind"] not in wanted:
                continue
            try:
                record = _record_of(values)
            except (KeyError, TypeError, ValueError, AttributeError):
                continue
            if isinstance(record, only):
                yield record


def _backward(file: BinaryIO) -> Iterator[bytes]:
    """Yield a file's lines from the last to the first."""
    place, line_end = file.seek(0, os.SEEK_END), b""
    while place:
        size = min(_BLOCK_BYTES, place)
        place = file.seek(place - size)
        line_end, *lines = (file.read(size) + line_end).split(b"\n")
        yield from reversed(lines)
    yield line_end
