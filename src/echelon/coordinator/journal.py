"""The scheduler's journal: one JSON line per thing that must survive its death, appended with one write each."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from echelon.core.files import write_whole


class Journal:
    """Appends entries to a file; `read` returns those of former lives."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self._end_torn_line()

    def write(self, kind: str, **values: Any) -> None:
        """Append one entry. It survives the death of this process when this returns."""
        write_whole(self._fd, json.dumps({"t": round(time.time(), 6), "kind": kind, **values}).encode() + b"\n")

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the whole entries, oldest first."""
        with self._path.open("rb") as file:
            for line in file:
                try:
                    entry = json.loads(line)
                except ValueError:
                    continue  # the line on which a former life ended
                if isinstance(entry, dict) and "kind" in entry:
                    yield entry

    def close(self) -> None:
        """Close the file."""
        os.close(self._fd)

    def _end_torn_line(self) -> None:
        size = os.fstat(self._fd).st_size
        if size and os.pread(self._fd, 1, size - 1) != b"\n":
            os.write(self._fd, b"\n")
