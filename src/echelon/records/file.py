"""The record of a run, `record.jsonl`: one JSON object a line, appended by rank 0 and the launcher, read by all else.

Each line is one `write` to a file opened for appending, so writers do not tear each other's lines; a reader skips a
last line that a crash cut off. A file that has grown is sealed, and what is older is thinned (see `segments.py`).
"""

from __future__ import annotations

import gc
import json
import logging
import math
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from pydantic_core import from_json

from echelon.core.errors import UserError
from echelon.core.lines import WaitingLines
from echelon.core.patience import PATIENCE_S, DiskNotice, Patience, print_notice
from echelon.records import kinds
from echelon.records.appended import AppendedFile, Compaction
from echelon.records.decode import decode, number
from echelon.records.events import EVENTS, DiskFails, DiskWorks, Event
from echelon.records.kinds import PipelineAction, Record, Resources, Start, Steps
from echelon.records.segments import FAN, RECORD_FILE, SEGMENT_BYTES, OpenFile, level_for, open_record

KINDS: dict[str, type[Record]] = {
    record.kind: record
    for record in vars(kinds).values()
    if isinstance(record, type) and issubclass(record, Record) and record.kind
}
"""The types of lines by their kind; events are told apart by their name."""

_EVENTS: dict[str, type[Event]] = {event().name: event for event in EVENTS}

_HEAD = re.compile(rb'\{"t": [^,"]*, "kind": "([^"\\]*)"')  # as `Recorder` begins a line
_BLOCK_BYTES = 1 << 20
_CONTINUED = "continued"
_MOST_WAITING = 32 << 20  # bytes of records that wait for the disk
_SAMPLED = {Steps.kind, Resources.kind}

R = TypeVar("R", bound=Record)


def _plain(value: Any) -> Any:
    if isinstance(value, PipelineAction):
        return value.row()
    return vars(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


_ENCODER = json.JSONEncoder(allow_nan=True, default=_plain)  # `json.dumps` with such settings would make one a line


def to_line(record: Record) -> bytes:
    """Return a record as its line."""
    return _line({"t": record.t, "kind": record.kind, **vars(record)})


def _line(values: Mapping[str, Any]) -> bytes:
    return _ENCODER.encode(values).encode() + b"\n"


class Recorder:
    """Append records to `record.jsonl` in a run's folder; a recorder without a folder drops them (ranks above 0).

    Records that the disk does not take are kept in memory and written later, in order; the disk's failing and its
    return are records too. The one that writes where attempts begin, and their steps, also seals the file when it is
    large (see `segments.py`).

    Attributes:
        patience: with the disk; what else this process writes to the run's folder may share it.
    """

    def __init__(self, folder: Path | None, segment_bytes: int = SEGMENT_BYTES, patience_s: float = PATIENCE_S) -> None:
        """Open the record of a folder.

        Args:
            patience_s: for how long the disk may take nothing before the run ends.
            segment_bytes: of a file that is sealed.

        Raises:
            OSError: it cannot be opened.
        """
        self.patience = Patience(folder or Path(), patience_s, self._tell)
        self._file = AppendedFile(folder) if folder is not None else None
        self._lines = WaitingLines(RECORD_FILE, self._append, self.patience, _MOST_WAITING)
        self._told_lost = 0
        self._compaction = Compaction(folder) if folder is not None else None
        self._start: Start | None = None
        self._segment_bytes = self._seal_at = segment_bytes

    def write(self, record: Record) -> None:
        """Append a record, with the present time as its `t`.

        Raises:
            UserError: the disk has taken nothing for longer than patience lasts.
        """
        if self._file is None:
            return
        values = {"t": math.nan, "kind": record.kind, **vars(record)}
        values["t"] = round(time.time(), 6)
        self._lines.append(_line(values))
        if isinstance(record, Start):
            self._start = replace(record, t=values["t"])
        elif isinstance(record, Steps) and self._start is not None and self._is_large(self._file):
            self._seal(self._file, self._start)

    def _is_large(self, file: AppendedFile) -> bool:
        return not self._lines.waiting and file.size > self._seal_at

    def _append(self, line: bytes) -> None:
        if self._file is None:
            raise ValueError("the record is closed")
        self._file.append(line)

    def _tell(self, notice: DiskNotice) -> None:
        print_notice(notice)
        if notice.seconds is None:
            self.write(DiskFails(notice.message, notice.what, notice.reason))
        else:
            lost, self._told_lost = self._lines.lost - self._told_lost, self._lines.lost
            dropped = f"; {lost} records in between are lost" if lost else ""
            self.write(DiskWorks(notice.message + dropped, notice.what, notice.reason, notice.seconds, lost))

    def _seal(self, file: AppendedFile, start: Start) -> None:
        """Begin a new file; its first line is the last start, so that who reads nothing else knows the processes."""
        try:
            line = _line({"t": start.t, "kind": start.kind, **vars(start), _CONTINUED: True})
            if file.seal(line) and self._compaction is not None:
                self._compaction.start()
            self._seal_at = self._segment_bytes
        except OSError as error:
            logging.warning("the record could not be sealed (%s): it is tried again when it has grown", error)
            self._seal_at = file.size + self._segment_bytes

    def flush(self) -> None:
        """Wait until everything is written, within patience.

        Raises:
            UserError: the disk has taken nothing for longer than patience lasts.
        """
        self._lines.flush()

    def close(self) -> None:
        """Write what waits, within patience, and close the file; later writes are dropped.

        Raises:
            UserError: the disk has taken nothing for longer than patience lasts.
        """
        try:
            self.flush()
        except UserError:
            if not self.patience.cut():
                raise
            lost = f"{self._lines.waiting} lines of {RECORD_FILE} are lost"
            print_notice(DiskNotice(lost, RECORD_FILE, "the disk took nothing until the run had to end"))
        finally:
            if self._file is not None:
                self._file.close()
                self._file = None
        if self._compaction is not None:
            self._compaction.close()


class Detail(Enum):
    """How much a reader wants of a record that earlier versions let grow in one file.

    THINNED: windows merged as they are in older segments. SAMPLED: evenly spaced windows; only the end has all.
    """

    ALL = "all"
    THINNED = "thinned"
    SAMPLED = "sampled"


class LineReader:
    """Turns lines into records.

    Attributes:
        lines: that were read so far, those left out included.
        torn: lines that are no JSON objects with a kind.
        unreadable: lines that are not what their kind needs.
        unreadable_rows: of lines that were read, rows that are not what they should be.
        offset: in the file that is read, behind the last whole line.
    """

    def __init__(self, only: tuple[type[Record], ...] = ()) -> None:
        """Read `only` some types of lines, whose subclasses count, or all."""
        self._only, self._kinds = only, {record.kind for record in only}
        self._begin()

    def _begin(self) -> None:
        self.offset = self.lines = self.torn = self.unreadable = self.unreadable_rows = 0

    def read_lines(self, file: BinaryIO, first: bool, to_end: bool, every: int = 1) -> Iterator[Record]:
        """Yield the records of a file from `offset` on.

        Args:
            first: it is the oldest of its record. In others a start that was continued is no attempt.
            to_end: a last line without its end is read as well.
            every: of the windows, and of the samples of resources, but those in the last megabytes.
        """
        sampled_until = os.fstat(file.fileno()).st_size - SEGMENT_BYTES if every > 1 else 0
        passed = 0
        file.seek(self.offset)
        for line in file:
            if not line.endswith(b"\n") and not to_end:
                return
            self.offset += len(line)
            if not line.strip():
                continue
            self.lines += 1
            if self.offset < sampled_until and _head_kind(line) in _SAMPLED:
                passed += 1
                if passed % every > 1:  # a window, and the resources after it
                    continue
            record = self._read(line, first)
            if record is not None:
                yield record

    def _read(self, line: bytes, first: bool) -> Record | None:
        if _is_other(line, self._kinds):
            return None
        values = _values(line)
        if values is None:
            self.torn += 1
            return None
        if (self._only and values["kind"] not in self._kinds) or (_CONTINUED in values and not first):
            return None
        try:
            record = _record_of(values)
        except (KeyError, TypeError, ValueError, AttributeError):
            self.unreadable += 1
            return None
        if record is None or (self._only and not isinstance(record, self._only)):
            return None
        self.unreadable_rows += record.rows_left_out
        return record


class RecordReader(LineReader):
    """Reads what was added to a folder's record since the last time; `offset` is in the file that was read last."""

    def __init__(self, folder: Path, only: tuple[type[Record], ...] = (), detail: Detail = Detail.ALL) -> None:
        """Read a folder's record; `only` some types of lines, whose subclasses count, or all."""
        super().__init__(only)
        self._folder, self._detail = folder, detail
        self._file_id, self._beginning = 0, b""

    def read(self, to_end: bool = False) -> tuple[bool, list[Record]]:
        """Return whether the record is another one than before (read from its beginning), and the records added.

        A last line without its end is left for the next time, unless it is read `to_end`. Kinds that are unknown here
        are left out.
        """
        with _no_collector(), open_record(self._folder) as files:
            new = self._unread(files)
            replaced = new is None
            if new is None:
                self._begin()
                self._file_id = 0
                new = files
            records: list[Record] = []
            for file in new:
                if file.file_id != self._file_id:
                    self._file_id, self.offset = file.file_id, 0
                self._beginning = file.beginning
                records += self._read_file(file, to_end or file is not files[-1])
        return replaced, records

    def _unread(self, files: Sequence[OpenFile]) -> Sequence[OpenFile] | None:
        """Return the files from the one on that was read last; None: it is not there, or was written anew."""
        if self._file_id == 0:
            return files
        for i, file in enumerate(files):
            is_same = file.file_id == self._file_id and file.beginning.startswith(self._beginning)
            if is_same and file.size >= self.offset:
                return files[i:]
        return None

    def _read_file(self, file: OpenFile, to_end: bool) -> Iterator[Record]:
        size = file.size - self.offset
        if self._detail is Detail.ALL or size < 2 * SEGMENT_BYTES:
            return self.read_lines(file.file, file.first, to_end)
        if self._detail is Detail.SAMPLED:
            return self.read_lines(file.file, file.first, to_end, every=2 * size // SEGMENT_BYTES)
        windows = FAN ** level_for(size)
        from echelon.records.thin import thinned  # numpy, which a command does without until its run has begun

        return thinned(self.read_lines(file.file, file.first, to_end), windows, windows, restart_steps(self._folder))


@contextmanager
def _no_collector() -> Iterator[None]:
    """Read without the collector of cycles: records have none, and it would look at all of them again and again."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def restart_steps(folder: Path) -> list[int]:
    """Return the steps at which the attempts of a record began, ascending."""
    return sorted({start.start_step for start in read_records(folder, Start)})


def _head_kind(line: bytes) -> str | None:
    """Return the kind of a line by its first words; None: only all of it tells."""
    head = _HEAD.match(line)
    return head[1].decode(errors="replace") if head else None


def _is_other(line: bytes, kinds: set[str]) -> bool:
    """Whether the first words of a line say that it is none of some kinds; the line need not be read then."""
    return bool(kinds) and _head_kind(line) not in (None, *kinds)


def _values(line: bytes) -> Mapping[str, Any] | None:
    """Return the object of a line; None: it is none with a kind."""
    try:
        values = from_json(line)  # seven times as fast as `json`, which knows lone surrogates
    except ValueError:
        try:
            values = json.loads(line)
        except (ValueError, RecursionError):
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
    if record_type is Steps and "tally" in values:
        from echelon.records.merged import MergedSteps

        record_type = MergedSteps
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
    with open_record(folder) as files:
        for line in (line for opened in reversed(files) for line in _backward(opened.file)):
            values = None if _is_other(line, wanted) else _values(line)
            if values is None or values["kind"] not in wanted:
                continue
            try:
                record = _record_of(values)
            except (KeyError, TypeError, ValueError, AttributeError):
                continue  # `LineReader` counts these for the report; here the one before stands in
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
