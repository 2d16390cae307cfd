"""What a process shows while it works: bars on a terminal; elsewhere lines, at least one now and then."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from echelon.core.output import broken_at_words
from echelon.core.units import format_seconds

_WHOLE = 1000  # columns
QUIET_S = 20.0  # in a pipe or a file nothing is silent for much longer
_LOOK_S = 0.25
_WIDE = 100  # columns in which a bar, its times and a sentence fit
_CLEAR_LINE = "\r\x1b[2K"


def print_table(table: Table) -> None:
    """Print a table whose cells stand for themselves, brackets too; who reads a pipe gets each row on one line."""
    console = Console(soft_wrap=True)
    if not console.is_terminal:
        console.width = _WHOLE
    console.print(table, markup=False)


class Bar:
    """Something that takes time: how far it is, and what there is to say of it."""

    def __init__(self, name: str, total: float | None, text: str = "", done: float = 0) -> None:
        self.name, self.total, self.text, self.done = name, total, text, done
        self.began_s = time.monotonic()
        self.task: TaskID | None = None

    def begin(self, name: str, total: float | None) -> None:
        """Show what comes next in the place of what is done, with a clock of its own."""
        self.name, self.total, self.done, self.began_s = name, total, 0, time.monotonic()

    def advance(self, by: float = 1) -> None:
        """Note that so much more is done."""
        self.done += by

    def line(self) -> str:
        """Return where it is, in one line."""
        took = format_seconds(time.monotonic() - self.began_s)
        share = f" {self.done:.0f} of {self.total:.0f}" if self.total else ""
        return f"{self.name}{share}, {took} so far{f': {self.text}' if self.text else ''}"


class Screen:
    """Bars on a terminal, lines elsewhere; `with Screen(...)`. What is not visible says nothing."""

    def __init__(self, visible: bool = True, to_stderr: bool = False, lines: bool = False) -> None:
        """Take where to show things: standard output, or error; `lines` in place of bars, where others write there."""
        file = sys.stderr if to_stderr else sys.stdout
        at_terminal = file.isatty()  # not as rich guesses: FORCE_COLOR, which notebooks set, makes no terminal
        self._console = Console(
            quiet=not visible, highlight=False, file=file, force_terminal=at_terminal, force_jupyter=False
        )
        self._visible, self.is_live = (
            visible,
            visible and at_terminal and not lines and not self._console.is_dumb_terminal,
        )
        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            *(
                [TextColumn("{task.fields[text]}")] if self._console.width >= _WIDE else []
            ),  # else it crowds the bar out
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        self._progress = Progress(*columns, console=self._console, transient=True, auto_refresh=False)
        self._bars: list[Bar] = []
        self._watched: list[tuple[str, Callable[[], bool]]] = []
        self._lock = threading.RLock()
        self._over = threading.Event()
        self._said_s = time.monotonic()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Screen:
        self._said_s = time.monotonic()
        self._begin()
        return self

    def _begin(self) -> None:
        if self._visible:
            self._over.clear()
            self._thread = threading.Thread(target=self._look, name="echelon-screen", daemon=True)
            self._thread.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Take the bars away, and say nothing any more by itself."""
        self._over.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._progress.live.is_started:
            self._progress.stop()

    @contextmanager
    def still(self) -> Iterator[None]:
        """Let no thread draw while the block takes: it may fork this process."""
        was_drawing = self._thread is not None
        self.close()
        try:
            yield
        finally:
            if was_drawing:
                self._begin()

    def say(self, text: str) -> None:
        """Print a line, above the bars."""
        with self._lock:
            self._said_s = time.monotonic()
            if self.is_live and not self._progress.live.is_started:
                self._console.file.write(_CLEAR_LINE)  # another process of the run may have drawn a bar there
            if self.is_live:
                text = broken_at_words(text, self._console.width)
            self._progress.console.print(text, markup=False, soft_wrap=True)

    @contextmanager
    def bar(self, name: str, total: float | None = None, text: str = "", done: float = 0) -> Iterator[Bar]:
        """Show something while the block takes; `total` None: it is not known how much there is."""
        bar = Bar(name, total, text, done)
        with self._lock:
            self._bars.append(bar)
        try:
            yield bar
        finally:
            with self._lock:
                self._bars.remove(bar)
                if bar.task is not None:
                    self._progress.remove_task(bar.task)

    def watch(self, name: str, goes_on: Callable[[], bool]) -> None:
        """Show something of which another thread knows whether it goes on."""
        self._watched.append((name, goes_on))

    def _look(self) -> None:
        """Show, until it is over."""
        seen: dict[str, Bar] = {}
        while not self._over.wait(_LOOK_S):
            with self._lock:
                for name, goes_on in self._watched:
                    going = goes_on()
                    if going and name not in seen:
                        seen[name] = Bar(name, None)
                        self._bars.append(seen[name])
                    elif not going and name in seen:
                        self._drop(seen.pop(name))
                if self.is_live:
                    self._draw()
                elif self._bars and time.monotonic() - self._said_s >= QUIET_S:
                    self.say("; ".join(bar.line() for bar in self._bars))

    def _drop(self, bar: Bar) -> None:
        self._bars.remove(bar)
        if bar.task is not None:
            self._progress.remove_task(bar.task)

    def _draw(self) -> None:
        for bar in self._bars:
            if bar.task is None:
                bar.task = self._progress.add_task(bar.name, total=bar.total, text=bar.text)
            self._progress.update(bar.task, description=bar.name, completed=bar.done, total=bar.total, text=bar.text)
        if self._bars and not self._progress.live.is_started:
            self._progress.start()
        elif self._bars:
            self._progress.refresh()  # by the one thread that there is
