"""What the user sees while a study goes: a live table of all runs on a terminal, a line for each run elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from echelon.core.units import format_seconds
from echelon.study.base import PlannedRun
from echelon.study.folder import RunEnd, run_folder
from echelon.study.progress import Progress, Tail
from echelon.study.rows import COMPLETED

CUT_SHORT = "cut short"  # it began, and the study ended before it did: it is done again
_TO_COME = ("waiting", "running", CUT_SHORT)
_STYLES = {
    COMPLETED: "green", "running": "bold", "refused": "red", "failed": "red", "stopped": "yellow", CUT_SHORT: "yellow",
}  # fmt: skip


@dataclass
class State:
    """One run on the screen."""

    run: PlannedRun
    status: str = "waiting"
    seconds: float = 0.0
    progress: Progress = field(default_factory=Progress)
    message: str = ""


class StudyDisplay:
    """Watches a study (`execute.Watch`); a context manager."""

    def __init__(self, path: Path, console: Console | None = None) -> None:
        self._path = path
        self._console = console or Console(highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._states: dict[str, State] = {}
        self._current: tuple[State, Tail, float] | None = None

    def __enter__(self) -> StudyDisplay:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def began(self, runs: Sequence[PlannedRun], ends: Mapping[str, RunEnd], over: frozenset[str]) -> None:
        """Show all runs, those that are over with what they reached."""
        for run in runs:
            state = self._states[run.name] = State(run)
            if run.name in over:
                end = ends.get(run.name, RunEnd(COMPLETED, "", 0.0))
                state.status, state.seconds, state.message = end.status, end.seconds, end.message
                state.progress = Tail(run_folder(self._path, run.name)).read()
        if over:
            self._say(f"{len(over)} of {len(runs)} runs are there already")
        self.goes_on()

    def started(self, run: PlannedRun, folder: Path) -> None:
        """Show that a run goes on."""
        state = self._states[run.name]
        state.status = "running"
        self._current = state, Tail(folder), time.monotonic()
        self.goes_on()

    def goes_on(self) -> None:
        """Show how far it is."""
        if self._current is not None:
            state, tail, began = self._current
            state.progress, state.seconds = tail.read(), time.monotonic() - began
        if self._console.is_terminal:
            self._live.update(self.view(), refresh=True)

    def ended(self, run: PlannedRun, end: RunEnd) -> None:
        """Show how a run ended."""
        self.goes_on()
        self._current = None
        state = self._states[run.name]
        state.status, state.seconds, state.message = end.status, end.seconds, end.message
        if not self._console.is_terminal:
            self._say(_line(state, self._place(), seconds_left(list(self._states.values()))))

    def view(self) -> Group:
        """The table, as many rows as the terminal has room for, and a line with what is left."""
        return study_table(list(self._states.values()), self._console.height)

    def _place(self) -> str:
        over = sum(s.status not in _TO_COME for s in self._states.values())
        return f"{over}/{len(self._states)}"

    def _say(self, text: str) -> None:
        self._console.print(text, markup=False, soft_wrap=True)


def study_table(states: list[State], height: int) -> Group:
    """Draw the runs of a study in about `height` rows, and a line with what is left."""
    shown = _window(states, max(3, height - 6))
    table = Table("run", "seed", "status", "done", "accuracy", "samples/s", "took", box=None, pad_edge=False)
    for column in table.columns[3:]:
        column.justify = "right"
    for state in shown:
        table.add_row(*_cells(state), style=_STYLES.get(state.status, "dim"))
    over = sum(s.status not in _TO_COME for s in states)
    left_s = seconds_left(states)
    left = f"; about {format_seconds(left_s)} left" if left_s or over < len(states) else ""
    said = f"{over} of {len(states)} runs over{left}" if over else "the first run"
    if cut := sum(s.status == CUT_SHORT for s in states):
        said += f"; {cut} cut short, which will be repeated from {'its' if cut == 1 else 'their'} start"
    hidden = len(states) - len(shown)
    return Group(table, Text(said + (f"; {hidden} runs not shown" if hidden else ""), style="dim"))


def _window(states: list[State], room: int) -> list[State]:
    """The rows around the run that goes on."""
    if len(states) <= room:
        return states
    at = next((i for i, s in enumerate(states) if s.status in _TO_COME), len(states) - 1)
    first = min(max(0, at - room // 2), len(states) - room)
    return states[first : first + room]


def name_of(run: PlannedRun) -> str:
    """Return what a run is called where its seed is said apart: its candidate, and the terms where they vary."""
    return f"{run.candidate} [{run.terms}]" if run.terms else run.candidate


def _cells(state: State) -> list[Text]:
    p = state.progress
    texts = [
        name_of(state.run),
        str(state.run.seed),
        state.status,
        f"{p.done:.0%}" if state.status in ("running", COMPLETED) else "",
        f"{p.top1:.4f}" if p.top1 is not None else "",
        f"{p.samples_per_s:,.0f}" if p.samples_per_s else "",
        format_seconds(state.seconds) if state.seconds else "",
    ]
    return [Text(text, overflow="ellipsis", no_wrap=True) for text in texts]


def _line(state: State, place: str, left_s: float) -> str:
    p = state.progress
    run = state.run
    parts = [f"[{place}] {name_of(run)}, seed {run.seed}: {state.status} in {format_seconds(state.seconds)}"]
    if state.status == COMPLETED and p.top1 is not None:
        parts.append(f"accuracy {p.top1:.4f}")
    if state.message:
        parts.append(state.message)
    if left_s:
        parts.append(f"about {format_seconds(left_s)} left")
    return "; ".join(parts)


def seconds_left(states: list[State]) -> float:
    """Estimate the seconds that are left: each run as long as those like it, the present one less what is done."""
    left = 0.0
    for state in states:
        if state.status in _TO_COME:
            done_s = state.seconds if state.status == "running" else 0.0  # what was cut short begins anew
            left += max(0.0, _expected(state, states) - done_s)
    return left


def _expected(state: State, states: list[State]) -> float:
    """How long those of the same candidate and terms took, or of the same terms, or all."""
    done = [s for s in states if s.status == COMPLETED and s.seconds]
    same_terms = [s for s in done if s.run.terms == state.run.terms]
    same = [s for s in same_terms if s.run.candidate == state.run.candidate]
    known = same or same_terms or done
    return fmean(s.seconds for s in known) if known else 0.0
