"""What the user sees while a study goes: a live table of all runs on a terminal, a line for each run elsewhere."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from echelon.core.columns import seconds_column
from echelon.core.units import format_metric, format_seconds
from echelon.observe.screen import QUIET_S
from echelon.study.base import COMPLETED, PlannedRun
from echelon.study.execute import How
from echelon.study.folder import RunEnd, run_folder
from echelon.study.progress import CUT_SHORT, UNFINISHED, RunStatus, Tail, progress_at_end, seconds_left

_STYLES = {
    COMPLETED: "green", "running": "bold", "refused": "red", "failed": "red", "stopped": "yellow", CUT_SHORT: "yellow",
}  # fmt: skip


class StudyDisplay:
    """Shows a study on the terminal (an `execute.StudyObserver`); a context manager."""

    def __init__(self, path: Path, console: Console | None = None, at_once: int = 1) -> None:
        self._path, self._at_once = path, at_once
        self._console = console or Console(highlight=False)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._states: dict[str, RunStatus] = {}
        self._current: dict[str, tuple[RunStatus, Tail, float]] = {}
        self._said_s = time.monotonic()
        self._left = "left"

    def __enter__(self) -> StudyDisplay:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def began(
        self, runs: Sequence[PlannedRun], ends: Mapping[str, RunEnd], over: frozenset[str], follows: str = ""
    ) -> None:
        """Show all runs, those that are over with what they reached; `follows` says which come after them."""
        self._left = "left of these" if follows else "left"
        for run in runs:
            state = self._states[run.name] = RunStatus(run)
            if run.name in over:
                end = ends.get(run.name, RunEnd(run.name, COMPLETED))
                self._over(state, end)
        if over:
            self._print(f"{len(over)} of {len(runs)} runs are there already")
        if len(over) < len(runs):
            common = [
                f" {word} {values.pop()}"
                for word, name in (("on", "data.source"), ("of", "model.name"), ("with --workers", "launch.workers"))
                if len(values := {str(run.settings[name]) for run in runs if name in run.settings}) == 1
            ]
            self._print(
                f"{len(runs) - len(over)} runs{''.join(common)}{follows}, {How(at_once=self._at_once).pace}, in "
                f"{self._path}; Ctrl-C stops the study, `echelon compare --run {self._path}` continues it"
            )
        self.goes_on()

    def started(self, run: PlannedRun, folder: Path) -> None:
        """Show that a run goes on."""
        state = self._states[run.name]
        state.status = "running"
        self._current[run.name] = state, Tail(folder), time.monotonic()
        self.goes_on()

    def queued(self, words: str) -> None:
        """Say what was handed over to a cluster's queue."""
        self._print(words)

    def goes_on(self) -> None:
        """Show how far those that run are."""
        for state, tail, began in self._current.values():
            state.progress, state.seconds = tail.read(), time.monotonic() - began
        if self._console.is_terminal:
            self._live.update(self.view(), refresh=True)
        elif time.monotonic() - self._said_s >= QUIET_S:
            self._print(self._running())

    def _running(self) -> str:
        """Return what goes on, in one line."""
        states = list(self._states.values())
        if not self._current:
            return f"[{_over(states)}/{len(states)}] a warm-up, whose times are thrown away"
        going = "; ".join(
            f"{state.run.title}, seed {state.run.seed}: {state.progress.done:.0%} after {format_seconds(state.seconds)}"
            for state, _, _ in self._current.values()
        )
        return f"[{_over(states) + 1}/{len(states)}] {going}"

    def ended(self, run: PlannedRun, end: RunEnd) -> None:
        """Show how a run ended."""
        self.goes_on()
        self._current.pop(run.name, None)
        state = self._states[run.name]
        self._over(state, end)
        if not self._console.is_terminal:
            states = list(self._states.values())
            self._print(
                _line(state, f"{_over(states)}/{len(states)}", seconds_left(states) / self._at_once, self._left)
            )

    def _over(self, state: RunStatus, end: RunEnd) -> None:
        state.status, state.seconds, state.message, state.waited_s = end.status, end.seconds, end.message, end.waited_s
        state.progress = progress_at_end(run_folder(self._path, state.run.name))

    def view(self) -> Group:
        """Return the table, as many rows as the terminal has room for, and a line with what is left."""
        return study_table(list(self._states.values()), self._console.height, self._at_once)

    def _print(self, text: str) -> None:
        self._said_s = time.monotonic()
        self._console.print(text, markup=False, soft_wrap=True)


def study_table(states: Sequence[RunStatus], height: int, at_once: int = 1) -> Group:
    """Draw the runs of a study in about `height` rows, and a line with what is left, where `at_once` of them go on."""
    shown = _around_running(states, max(3, height - 6))
    took = seconds_column("took", [state.seconds or None for state in shown])
    table = Table("run", "seed", "status", "done", _metric(shown), "samples/s", took.head, box=None, pad_edge=False)
    for column in (table.columns[1], *table.columns[3:]):
        column.justify = "right"
    for state, seconds in zip(shown, took.cells, strict=True):
        table.add_row(*_cells(state, seconds), style=_STYLES.get(state.status, "dim"))
    over, left_s = _over(states), seconds_left(states) / at_once
    left = f"; about {format_seconds(left_s)} left" if left_s or over < len(states) else ""
    text = f"{over} of {len(states)} runs over{left}" if over else "the first run"
    if cut := sum(s.status == CUT_SHORT for s in states):
        text += f"; {cut} cut short, which will be repeated from {'its' if cut == 1 else 'their'} start"
    hidden = len(states) - len(shown)
    return Group(table, Text(text + (f"; {hidden} runs not shown" if hidden else ""), style="dim"))


def _metric(states: Sequence[RunStatus]) -> str:
    """Name the metric by which runs are compared, where their records tell one."""
    named = {state.progress.primary.title for state in states if state.progress and state.progress.value is not None}
    return named.pop() if len(named) == 1 else "metric"


def _over(states: Sequence[RunStatus]) -> int:
    return sum(s.status not in UNFINISHED for s in states)


def _around_running(states: Sequence[RunStatus], room: int) -> Sequence[RunStatus]:
    """Return at most `room` states, those around the first that is not over."""
    if len(states) <= room:
        return states
    at = next((i for i, s in enumerate(states) if s.status in UNFINISHED), len(states) - 1)
    first = min(max(0, at - room // 2), len(states) - room)
    return states[first : first + room]


def _cells(state: RunStatus, took: str) -> list[Text]:
    p = state.progress
    texts = [
        state.run.title,
        str(state.run.seed),
        state.status,
        f"{p.done:.0%}" if state.status in ("running", COMPLETED) else "",
        format_metric(p.value) if p.value is not None else "",
        f"{p.samples_per_s:,.0f}" if p.samples_per_s else "",
        took if state.seconds else "",
    ]
    return [Text(text, overflow="ellipsis", no_wrap=True) for text in texts]


def _line(state: RunStatus, place: str, left_s: float, left: str = "left") -> str:
    run, p = state.run, state.progress
    clauses = [f"[{place}] {run.title}, seed {run.seed}: {state.status} in {format_seconds(state.seconds)}"]
    if state.status == COMPLETED and p.value is not None:
        clauses.append(f"{p.primary.noun or p.primary.title} {format_metric(p.value)}")
    if state.message:
        clauses.append(state.message)
    if left_s:
        clauses.append(f"about {format_seconds(left_s)} {left}")
    return "; ".join(clauses)
