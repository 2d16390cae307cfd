"""Curves and settings for TensorBoard, beside the record."""

from __future__ import annotations

import io
import os
import socket
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.core.files import write_whole
from echelon.core.patience import Patience
from echelon.observe.callbacks import Callback, EndInfo, EvaluationInfo, RunInfo, WindowInfo, values_of

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary

_WRITE_S = 10.0
_MOST_WAITING = 100_000
_CURVES = "curves"


@dataclass(frozen=True)
class _Point:
    """Values by name, such as `train/loss`, of an optimizer step: all are one event, which costs a third."""

    time: float
    step: int
    values: Mapping[str, float]


class TensorBoard(Callback):
    """Writes TensorBoard events to `RUN/tensorboard`: curves, and the run's settings as hyperparameters.

    Points are written every few seconds, and made into events only then: what makes them is imported when the first
    steps are done. Events that the disk does not take wait in memory, the newest `_MOST_WAITING` of them; a run does
    not end for its curves.
    """

    def __init__(self, folder: Path, patience: Patience) -> None:
        """Take a run's folder, and its process's patience with the disk."""
        self._folder, self._patience = folder, patience
        self._points: list[_Point] = []  # no events yet
        self._waiting: deque[bytes] = deque(maxlen=_MOST_WAITING)
        self._fd: int | None = None
        self._size = 0  # of what is whole in the file
        self._written_s = time.monotonic()
        self._run: RunInfo | None = None  # until its settings are events
        self._began_t = 0.0
        self._settings_end: Summary | None = None
        self._score = ""

    def on_start(self, run: RunInfo) -> None:
        """Take the settings; the HPARAMS tab shows them beside the primary metric and the loss of evaluations."""
        self._run, self._began_t, self._score = run, time.time(), run.score

    def on_window(self, window: WindowInfo) -> None:
        """Write the last step's loss and learning rate, the speed, and what is counted in training."""
        self._write_values(window.step, values_of(window, self._score))

    def on_evaluation(self, evaluation: EvaluationInfo) -> None:
        """Write loss and metrics."""
        self._write_values(evaluation.step, values_of(evaluation))

    def on_end(self, end: EndInfo) -> None:
        """Write what is left, if the disk takes it."""
        self._make_events()
        if self._settings_end is not None:
            self._waiting.append(_event(time.time(), 0, self._settings_end))
        self.close()

    def _write_values(self, step: int, values: Mapping[str, float]) -> None:
        self._points.append(_Point(time.time(), step, values))
        if time.monotonic() - self._written_s >= _WRITE_S:
            self._make_events()
            self._patience.attempt(_CURVES, self._write, essential=False)

    def _make_events(self) -> None:
        """Make what is to be written of the settings and of the points so far."""
        from tensorboard.compat.proto.summary_pb2 import Summary
        from torch.utils.tensorboard.summary import hparams

        if (run := self._run) is not None:
            self._run = None
            settings = {name: float(v) if isinstance(v, bool) else v for name, v in run.settings.items() if v != ""}
            metrics = {f"test/{run.metric.name}": 0.0, "test/loss": 0.0}
            *described, self._settings_end = hparams(settings, metrics)
            self._waiting.extend(_event(self._began_t, run.start_step, each) for each in described)
        for point in self._points:
            values = [Summary.Value(tag=tag, simple_value=v) for tag, v in point.values.items()]
            self._waiting.append(_event(point.time, point.step, Summary(value=values)))
        self._points.clear()

    def close(self) -> None:
        """Write what is left, if the disk takes it, and close the file."""
        if self._points or self._run is not None:
            self._make_events()
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
            from tensorboard.compat.proto.event_pb2 import Event

            folder = self._folder / "tensorboard"
            folder.mkdir(exist_ok=True)
            name = f"events.out.tfevents.{time.time():.0f}.{socket.gethostname()}.{os.getpid()}.0"
            self._fd = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
            first = Event(wall_time=time.time(), file_version="brain.Event:2")
            self._waiting.appendleft(_framed(first.SerializeToString()))
        return self._fd


def _event(time_t: float, step: int, summary: Summary) -> bytes:
    from tensorboard.compat.proto.event_pb2 import Event

    return _framed(Event(wall_time=time_t, step=step, summary=summary).SerializeToString())


def _framed(event: bytes) -> bytes:
    """Return an event as it stands in a file: with its length and checksums."""
    from tensorboard.summary.writer.record_writer import RecordWriter

    buffer = io.BytesIO()
    RecordWriter(buffer).write(event)
    return buffer.getvalue()
