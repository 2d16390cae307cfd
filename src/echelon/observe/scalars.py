"""Curves for TensorBoard, beside the record."""

from __future__ import annotations

import io
import os
import socket
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from echelon.core.files import write_whole
from echelon.core.patience import Patience

_WRITE_S = 10.0
_MOST_WAITING = 100_000
_CURVES = "curves"


class Scalars:
    """Writes TensorBoard events to `RUN/tensorboard`; without a folder (ranks above 0) it writes nothing.

    Points are written every few seconds. Those that the disk does not take wait in memory, the newest `_MOST_WAITING`
    of them; a run does not end for its curves.
    """

    def __init__(self, folder: Path | None, patience: Patience) -> None:
        """Take a run's folder, and its process's patience with the disk."""
        self._folder, self._patience = folder, patience
        self._waiting: deque[bytes] = deque(maxlen=_MOST_WAITING)
        self._fd: int | None = None
        self._size = 0  # of what is whole in the file
        self._written_s = time.monotonic()

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Write values by name, such as `train/loss`, at an optimizer step: all in one event, which costs a third."""
        if self._folder is None:
            return
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        named = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        event = Event(wall_time=time.time(), step=step, summary=Summary(value=named))
        self._waiting.append(_framed(event.SerializeToString()))
        if time.monotonic() - self._written_s >= _WRITE_S:
            self._patience.attempt(_CURVES, self._write, essential=False)

    def close(self) -> None:
        """Write what is left, if the disk takes it."""
        if self._waiting:
            self._patience.attempt(_CURVES, self._write, essential=False)
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    def _write(self) -> None:
        fd = self._open()
        self._written_s = time.monotonic()
        data = b"".join(self._waiting)
        try:
            write_whole(fd, data)
        except OSError:
            with suppress(OSError):  # a reader stops at a record that was cut
                os.ftruncate(fd, self._size)
            raise
        self._size += len(data)
        self._waiting.clear()

    def _open(self) -> int:
        if self._fd is None:
            assert self._folder is not None
            from tensorboard.compat.proto.event_pb2 import Event

            folder = self._folder / "tensorboard"
            folder.mkdir(exist_ok=True)
            name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}.0"
            self._fd = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            first = Event(wall_time=time.time(), file_version="brain.Event:2")
            self._waiting.appendleft(_framed(first.SerializeToString()))
        return self._fd


def _framed(event: bytes) -> bytes:
    """Return an event as it stands in a file: with its length and checksums."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    buffer = io.BytesIO()
    RecordWriter(buffer).write(event)
    return buffer.getvalue()
