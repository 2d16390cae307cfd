"""`echelon watch`: a run or a study while it goes, in the terminal or as a local page."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType
from rich.live import Live

from echelon.cli.app import COMMANDS, as_command
from echelon.core.errors import UserError, naming, nearest
from echelon.core.units import format_seconds, parse_seconds

_EVERY_S = 0.5
_LINE_EVERY_S = 10.0  # without a terminal
_PLAIN_WIDTH = 120
_MARKS = ("study.yaml", "config.yaml", "record.jsonl")  # what a run's or a study's folder holds, one of them


@dataclass(frozen=True)
class View:
    """How something is watched: `look` reads what is new; `over` says whether that was the last.

    `frame` draws what was read in about so many rows, `line` says it in one.
    """

    look: Callable[[], None]
    over: Callable[[], bool]
    frame: Callable[[int], RenderableType]
    line: Callable[[], str]


def command() -> Any:
    """Build `echelon watch`."""

    def watch(
        run: Annotated[str, typer.Argument(metavar="RUN|STUDY", help="the folder of a run or a study")],
        once: Annotated[bool, typer.Option("--once", help="print how it stands now, as plain text, and end")] = False,
        serve: Annotated[bool, typer.Option("--serve", help="show it as a page on this machine instead")] = False,
        port: Annotated[int, typer.Option("--port", help="of the page; 0: any free one")] = 0,
        wait: Annotated[str, typer.Option("--wait", help="for a folder that is not there yet")] = "1m",
    ) -> None:
        path = Path(run)
        with naming("--wait"):
            seconds = parse_seconds(wait)
        if port and not serve:
            raise UserError("--port is the page's: it needs --serve")
        if once and serve:
            raise UserError("--once and --serve exclude each other")
        with contextlib.suppress(KeyboardInterrupt):  # the way to end it
            _wait_for(path, 0.0 if once else seconds)
            if serve:
                from echelon.cli.serving import serve_here

                serve_here(path, port)
            else:
                _show(_view(path), once)

    return as_command(watch, "watch", COMMANDS["watch"][1])


def _wait_for(path: Path, seconds: float) -> None:
    """Wait until a folder holds a run or a study.

    Raises:
        UserError: it does not, in time; or it is no folder.
    """
    ends, said = time.monotonic() + seconds, False
    while True:
        if path.exists() and not path.is_dir():
            raise UserError(f"{path} is a file: name the folder of a run or a study (runs/NAME)")
        if any((path / name).exists() for name in _MARKS):
            return
        if time.monotonic() >= ends:
            break
        if not said:
            print(f"no run in {path} yet: waiting up to {format_seconds(seconds)} for it", file=sys.stderr, flush=True)
            said = True
        time.sleep(min(_EVERY_S, max(0.0, ends - time.monotonic())))
    known = sorted({str(p.parent) for name in _MARKS for p in Path("runs").glob(f"*/{name}")})
    what = "is an empty folder" if path.is_dir() and not any(path.iterdir()) else "holds no run and no study"
    hint = nearest(str(path), known) or "name the folder of a run or a study (runs/NAME)"
    raise UserError(f"{path} {what if path.is_dir() else 'does not exist'}: {hint}".rstrip())


def _view(path: Path) -> View:
    return _view_of_study(path) if (path / "study.yaml").exists() else _view_of_run(path)


def _view_of_run(path: Path) -> View:
    from echelon.reporting.live import snapshot, state, terminal

    run = state.LiveRun(path)
    now = snapshot.look(run)

    def look() -> None:
        nonlocal now
        run.refresh()
        now = snapshot.look(run)

    return View(look, lambda: now.over, lambda height: terminal.frame(now, height), lambda: terminal.line(now))


def _view_of_study(path: Path) -> View:
    from rich.console import Group
    from rich.text import Text

    from echelon.reporting.live.terminal import STYLES
    from echelon.study.live import study_table
    from echelon.study.watch import OVER, StudyWatch

    watch = StudyWatch(path)
    now = watch.status()

    def look() -> None:
        nonlocal now
        watch.refresh()
        now = watch.status()

    def said() -> str:
        return f"{now.status}: {now.message}" if now.message else now.status

    def frame(height: int) -> RenderableType:
        head = Text.assemble((path.resolve().name, "bold"), "  ", (said(), STYLES.get(now.status, "")))
        return Group(head, study_table(watch.states, height))

    def line() -> str:
        over = sum(s.status in OVER for s in watch.states)
        going = next((f"; {s.run.name} {s.progress.done:.0%}" for s in watch.states if s.status == "running"), "")
        return f"{path.resolve().name}: {said()}  {over} of {len(watch.states)} runs over{going}"

    return View(look, lambda: now.over, frame, line)


def _show(view: View, once: bool) -> None:
    console = Console(highlight=False)
    if once or not console.is_terminal:
        width = console.width if console.is_terminal else max(console.width, _PLAIN_WIDTH)
        plain = Console(highlight=False, color_system=None, force_terminal=False, width=width)
        _show_plainly(view, plain, once)
        return
    with Live(console=console, auto_refresh=False) as live:
        while True:
            view.look()
            live.update(view.frame(console.height - 1), refresh=True)
            if view.over():
                return
            time.sleep(_EVERY_S)


def _show_plainly(view: View, console: Console, once: bool) -> None:
    """Without a terminal: a line now and then, the whole frame at the end."""
    before, said_s = "", 0.0
    while True:
        view.look()
        if once or view.over():
            console.print(view.frame(200))
            return
        if time.monotonic() - said_s >= _LINE_EVERY_S and (line := view.line()) != before:
            print(line, flush=True)
            before, said_s = line, time.monotonic()
        time.sleep(_EVERY_S)
