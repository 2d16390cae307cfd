"""What a logger is, and the thread in which it works: no step waits for a service, and no run ends for one."""

from __future__ import annotations

import math
import threading
import time
import uuid
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, TypeVar

from echelon.core.errors import UserError
from echelon.core.files import write_atomic
from echelon.core.units import format_seconds
from echelon.observe.callbacks import Callback, EndInfo, EvaluationInfo, RunInfo, WindowInfo, values_of

IDS_FOLDER = "loggers"  # of a run: under which identifier each service knows it
END_S = 10.0
_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 60.0
_MOST_WAITING = 100_000

R = TypeVar("R")


@dataclass(frozen=True)
class Point:
    """Values by name at an optimizer step, and when they were told, in unix seconds."""

    step: int
    values: Mapping[str, float]
    t: float


class LoggedRun(ABC):
    """A run as a service has it."""

    @abstractmethod
    def log(self, points: Sequence[Point]) -> None:
        """Add points to its curves."""

    @abstractmethod
    def finish(self, status: str) -> None:
        """End it: `completed`, `stopped` or `failed`; sends what is left."""


@dataclass(frozen=True)
class LoggerSettings(ABC):
    """A logger's settings.

    Attributes:
        package: that it needs.
    """

    package: ClassVar[str]

    @abstractmethod
    def begin(self, run: RunInfo, known_as: str, new_id: str) -> tuple[LoggedRun, str]:
        """Begin a run, or go on with it; returns it and its identifier.

        Whatever is raised is said once and tried again later.

        Args:
            known_as: the identifier that an earlier attempt returned; empty: there was none.
            new_id: one that no other run has, for services that take one.
        """


def own_loggers(loggers: Sequence[object]) -> Mapping[str, LoggerSettings]:
    """Return loggers of a caller's own by the names of their classes, under which a run's folder keeps identifiers.

    Raises:
        UserError: one is none, or two are of one class.
    """
    named: dict[str, LoggerSettings] = {}
    for logger in loggers:
        name = logger.__name__ if isinstance(logger, type) else type(logger).__name__
        if not isinstance(logger, LoggerSettings):
            raise UserError(
                f"loggers: {name} is no object of a subclass of echelon.observe.loggers.base.LoggerSettings; what only "
                "listens is a callback: callbacks=[...]"
            )
        if name in named:
            raise UserError(f"loggers: there are two of class {name}, and a run knows each by its class")
        named[name] = logger
    return named


class BackgroundLogger(Callback):
    """Gives a service what it is told, from a thread of its own.

    While the service cannot be reached, points wait in memory, the newest `_MOST_WAITING` of them, and that is said
    once. The run's end waits at most `END_S` seconds.
    """

    def __init__(self, name: str, settings: LoggerSettings, say: Callable[[str], None], end_s: float = END_S) -> None:
        """Take the logger's name and settings, and what tells the user a sentence."""
        self._name, self._settings, self._say, self._end_s = name, settings, say, end_s
        self._points: deque[Point] = deque(maxlen=_MOST_WAITING)
        self._score, self._status, self._trouble = "", "", False
        self._ends_by = math.inf  # when the run's end waits no longer
        self._new, self._over = threading.Event(), threading.Event()
        self._thread: threading.Thread | None = None

    def on_start(self, run: RunInfo) -> None:
        """Begin to work."""
        self._score = run.score
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, args=(run,), name=f"logger {self._name}", daemon=True)
            self._thread.start()

    def on_window(self, window: WindowInfo) -> None:
        """Take loss, speed, learning rate and score of a window's last step."""
        self._put(window.step, values_of(window, self._score))

    def on_evaluation(self, evaluation: EvaluationInfo) -> None:
        """Take loss and metrics."""
        self._put(evaluation.step, values_of(evaluation))

    def on_end(self, end: EndInfo) -> None:
        """End the run at the service; say so where that takes too long."""
        if self._thread is None:
            return
        self._status, self._ends_by = end.status, time.monotonic() + self._end_s
        self._over.set()
        self._new.set()
        self._thread.join(self._end_s)
        if self._thread.is_alive() or self._points:
            self._say(f"--logger {self._name}: the service has not taken everything within {self._end_s:g} s")

    def _put(self, step: int, values: Mapping[str, float]) -> None:
        self._points.append(Point(step, values, time.time()))
        self._new.set()

    def _work(self, run: RunInfo) -> None:
        file, new_id = run.folder / IDS_FOLDER / self._name, uuid.uuid4().hex
        known_as = file.read_text() if file.exists() else ""
        begun = self._insist(lambda: self._settings.begin(run, known_as, new_id))
        if begun is None:
            return
        logged, run_id = begun
        if run_id != known_as:
            self._insist(lambda: _keep(file, run_id))
        over = False
        while not over:
            self._new.wait()
            self._new.clear()
            over = self._over.is_set()
            self._insist(lambda: self._log(logged))
        self._insist(lambda: logged.finish(self._status))

    def _log(self, logged: LoggedRun) -> None:
        points = list(self._points)
        if points:
            logged.log(points)
        for _ in points:
            self._points.popleft()

    def _insist(self, action: Callable[[], R]) -> R | None:
        """Do something until it works; None: it did not while the run's end waited for it."""
        pause_s, began_s = _FIRST_PAUSE_S, time.monotonic()
        while True:
            try:
                result = action()
            except Exception as error:  # noqa: BLE001 - whatever a client of a service raises
                self._say_trouble(error)
            else:
                self._say_works(time.monotonic() - began_s)
                return result
            if time.monotonic() + _FIRST_PAUSE_S > self._ends_by:
                return None
            if self._over.wait(pause_s):
                time.sleep(_FIRST_PAUSE_S)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _say_trouble(self, error: Exception) -> None:
        if not self._trouble:
            self._trouble = True
            said = " ".join(str(error).split())[:200]
            self._say(f"--logger {self._name}: {type(error).__name__}: {said}; training goes on, and it is tried again")

    def _say_works(self, after_s: float) -> None:
        if self._trouble:
            self._trouble = False
            self._say(f"--logger {self._name} works again after {format_seconds(after_s)}")


def _keep(file: Path, run_id: str) -> None:
    file.parent.mkdir(exist_ok=True)
    write_atomic(file, run_id)
