"""A run or a study watched on a terminal: redrawn while it goes, or a line now and then where there is no terminal."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Protocol

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from echelon.core.errors import UserError, nearest
from echelon.core.units import format_seconds
from echelon.reporting.live import snapshot, state, terminal
from echelon.study.clock import study_time
from echelon.study.file import is_study
from echelon.study.live import study_table
from echelon.study.progress import running_at_once
from echelon.study.watch import OVER, StudyWatch

_EVERY_S = 0.5
_LINE_EVERY_S = 10.0  # without a terminal
_PLAIN_WIDTH = 120
_MARKS = ("study.yaml", "config.yaml", "record.jsonl")  # a folder with one of them holds a run or a study


class View(Protocol):
    """Something that is watched; `read` first, then draw."""

    def read(self) -> None:
        """Read what is new."""

    def over(self) -> bool:
        """Return whether what was read is the last."""

    def frame(self, height: int) -> RenderableType:
        """Draw what was read in about `height` rows."""

    def line(self) -> str:
        """Say what was read in one line."""


class WatchedRun:
    """A run's view."""

    def __init__(self, path: Path) -> None:
        self._run = state.LiveRun(path)
        self._now = snapshot.look(self._run)

    def read(self) -> None:
        """Read what is new."""
        self._run.refresh()
        self._now = snapshot.look(self._run)

    def over(self) -> bool:
        """Return whether the run is over."""
        return self._now.over

    def frame(self, height: int) -> RenderableType:
        """Draw the run in about `height` rows."""
        return terminal.frame(self._now, height)

    def line(self) -> str:
        """Say how the run stands in one line."""
        return terminal.line(self._now)


class WatchedStudy:
    """A study's view."""

    def __init__(self, path: Path) -> None:
        self._path, self._name = path, path.resolve().name
        self._watch = StudyWatch(path)
        self._now = self._watch.status()

    def read(self) -> None:
        """Read what is new."""
        self._watch.refresh()
        self._now = self._watch.status()

    def over(self) -> bool:
        """Return whether the study is over."""
        return self._now.over

    def frame(self, height: int) -> RenderableType:
        """Draw the study's status and its runs in about `height` rows."""
        style = terminal.STYLES.get(self._now.status, "")
        head = Text.assemble((self._name, "bold"), "  ", (self._status(), style))
        took = study_time(self._path) if self._now.over else None
        if took is not None:
            head.append(f"  in {format_seconds(took.seconds)}")
        return Group(head, study_table(self._watch.states, height, running_at_once(self._watch.states)))

    def line(self) -> str:
        """Say how the study stands in one line."""
        states = self._watch.states
        over = sum(s.status in OVER for s in states)
        going = next((f"; {s.run.name} {s.progress.done:.0%}" for s in states if s.status == "running"), "")
        return f"{self._name}: {self._status()}  {over} of {len(states)} runs over{going}"

    def _status(self) -> str:
        return f"{self._now.status}: {self._now.message}" if self._now.message else self._now.status


def wait_for_folder(path: Path, seconds: float) -> None:
    """Wait until a folder holds a run or a study, and say on stderr that it is waited for.

    Raises:
        UserError: it does not, in time; or it is no folder.
    """
    ends, announced = time.monotonic() + seconds, False
    while True:
        if path.exists() and not path.is_dir():
            raise UserError(f"{path} is a file: name the folder of a run or a study (runs/NAME)")
        if any((path / name).exists() for name in _MARKS):
            return
        if time.monotonic() >= ends:
            break
        if not announced:
            waits = f"waiting up to {format_seconds(seconds)} for it (--wait; Ctrl-C ends it)"
            print(f"no run in {path} yet: {waits} {_nearest_run(path)}".rstrip(), file=sys.stderr, flush=True)
            announced = True
        time.sleep(min(_EVERY_S, max(0.0, ends - time.monotonic())))
    what = "is an empty folder" if path.is_dir() and not any(path.iterdir()) else "holds no run and no study"
    hint = _nearest_run(path) or "name the folder of a run or a study (runs/NAME)"
    raise UserError(f"{path} {what if path.is_dir() else 'does not exist'}: {hint}".rstrip())


def _nearest_run(path: Path) -> str:
    """Return a hint at the run of a similar name; empty: there is none."""
    return nearest(str(path), sorted({str(p.parent) for name in _MARKS for p in Path("runs").glob(f"*/{name}")}))


def show(path: Path, once: bool) -> None:
    """Show a run or a study in the terminal until it is over; `once`: as plain text, as it is now.

    Raises:
        UserError: a study's description cannot be read.
    """
    view: View = WatchedStudy(path) if is_study(path) else WatchedRun(path)
    console = Console(highlight=False)
    if once or not console.is_terminal:
        width = console.width if console.is_terminal else max(console.width, _PLAIN_WIDTH)
        _show_plainly(view, Console(highlight=False, color_system=None, force_terminal=False, width=width), once)
        return
    with Live(console=console, auto_refresh=False) as live:
        while True:
            view.read()
            live.update(view.frame(console.height - 1), refresh=True)
            if view.over():
                return
            time.sleep(_EVERY_S)


def _show_plainly(view: View, console: Console, once: bool) -> None:
    """Print a line now and then, and the whole frame at the end."""
    last, printed_s = "", 0.0
    while True:
        view.read()
        if once or view.over():
            console.print(view.frame(200))
            return
        if time.monotonic() - printed_s >= _LINE_EVERY_S and (line := view.line()) != last:
            print(line, flush=True)
            last, printed_s = line, time.monotonic()
        time.sleep(_EVERY_S)
