"""Following a record that grows: only what was added is read; and curves of bounded length."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from echelon.records.file import RECORD_FILE

Json = dict[str, Any]


class Follower:
    """Reads what was added to a run's record since the last time."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / RECORD_FILE
        self._offset = 0
        self._file_id = 0
        self.torn = 0

    def read(self) -> tuple[bool, list[Json]]:
        """Return whether the file is another one than before (read from its beginning), and the records added.

        A last line without its end is left for the next time; a whole line that is no record is counted as torn.
        """
        try:
            file = self._path.open("rb")
        except FileNotFoundError:
            anew = self._offset > 0
            self._offset = self._file_id = self.torn = 0
            return anew, []
        with file:
            status = os.fstat(file.fileno())  # of what is open, whatever has the name by now
            anew = self._file_id not in (0, status.st_ino) or status.st_size < self._offset
            if anew:
                self._offset = self.torn = 0
            self._file_id = status.st_ino
            file.seek(self._offset)
            found = []
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._offset += len(line)
                record = _record(line)
                if record is not None:
                    found.append(record)
                elif line.strip():
                    self.torn += 1
        return anew, found


def _record(line: bytes) -> Json | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and "kind" in record else None


class Curve:
    """Points (x, y...) in the order of x: at most `limit`, neighbours are averaged when there are more.

    >>> curve = Curve(2)
    >>> for x in (1, 2, 3, 4, 5): curve.add(x, [2.0 * x])
    >>> curve.points()
    [[4, 5.0], [5, 10.0]]
    """

    def __init__(self, limit: int = 400) -> None:
        self._limit, self._each = limit, 1
        self._points: list[tuple[float, list[float], int]] = []

    def add(self, x: float, y: Sequence[float]) -> None:
        """Add a point to the right; a different number of values begins the curve anew."""
        values = list(y)
        if self._points and len(self._points[-1][1]) != len(values):
            self.clear()
        if self._points and self._points[-1][2] < self._each:
            self._points[-1] = _mean(self._points[-1], (x, values, 1))
        else:
            self._points.append((x, values, 1))
        if len(self._points) > self._limit:
            halves = zip(self._points[::2], self._points[1::2])
            odd = self._points[-1:] if len(self._points) % 2 else []
            self._points = [*(_mean(a, b) for a, b in halves), *odd]
            self._each *= 2

    def forget_after(self, x: float) -> None:
        """Drop what lies beyond a place."""
        while self._points and self._points[-1][0] > x:
            self._points.pop()

    def clear(self) -> None:
        """Drop all."""
        self._points, self._each = [], 1

    def points(self) -> list[list[float]]:
        """Return one list [x, y...] per point."""
        return [[x, *y] for x, y, _ in self._points]


def _mean(a: tuple[float, list[float], int], b: tuple[float, list[float], int]) -> tuple[float, list[float], int]:
    n = a[2] + b[2]
    return b[0], [(p * a[2] + q * b[2]) / n for p, q in zip(a[1], b[1])], n
