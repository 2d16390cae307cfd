"""The record of a run: one JSON object a line, appended by rank 0 and by the launcher, read by the report.

Each line is one `write` to a file opened for appending, so writers do not tear each other's lines; a reader skips a
last line that a crash cut off.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from echelon.core.files import write_whole

RECORD_FILE = "record.jsonl"
_ENCODER = json.JSONEncoder(allow_nan=True, default=str)  # `json.dumps` with such settings would make one a line


class Recorder:
    """Append records to `record.jsonl` in a run's folder; a recorder without a folder drops them (ranks above 0)."""

    def __init__(self, folder: Path | None) -> None:
        self._fd: int | None = None
        if folder is not None:
            self._fd = os.open(folder / RECORD_FILE, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
            _end_torn_line(folder / RECORD_FILE, self._fd)

    def write(self, kind: str, **values: Any) -> None:
        """Append one record of a kind with the present time `t` in unix seconds."""
        if self._fd is None:
            return
        line = _ENCODER.encode({"t": round(time.time(), 6), "kind": kind, **values})
        write_whole(self._fd, line.encode() + b"\n")

    def event(self, name: str, message: str, **details: Any) -> None:
        """Append an event: its name, one sentence, and details."""
        self.write("event", name=name, message=message, **details)

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


def read_records(folder: Path) -> list[dict[str, Any]]:
    """Read a run's records in the order written; lines that are not whole JSON objects are left out."""
    return list(_whole_lines(folder / RECORD_FILE))


def _whole_lines(path: Path) -> Iterator[dict[str, Any]]:
    if not path.exists():
        return
    with path.open("rb") as file:
        for line in file:
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if isinstance(record, dict) and "kind" in record:
                yield record
