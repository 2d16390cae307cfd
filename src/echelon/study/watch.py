"""A study watched from outside: which run goes on, how far each is, read from its folder alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.records.going import is_held
from echelon.reporting.live.snapshot import Snapshot, look
from echelon.reporting.live.state import LiveRun
from echelon.study.base import PlannedRun
from echelon.study.file import STUDY_FILE, load_study
from echelon.study.folder import RunEnd, read_ends, run_folder
from echelon.study.live import CUT_SHORT, State, seconds_left
from echelon.study.plan import planned_runs
from echelon.study.progress import Progress, Tail

OVER = ("completed", "refused", "failed", "stopped")


@dataclass(frozen=True)
class RankStatus:
    """How a study stands; `over`: nothing more will come unless it is continued."""

    status: str
    message: str
    over: bool


class StudyWatch:
    """Follows a study's folder; each `refresh` reads what is new.

    Raises:
        UserError: the study's description cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._runs = planned_runs(load_study(path / STUDY_FILE))
        self._ended: dict[str, State] = {}
        self._live: dict[str, LiveRun] = {}
        self.states = [State(run) for run in self._runs]

    def refresh(self) -> list[State]:
        """Return how each run stands now, in their order."""
        ends = read_ends(self.path)
        self.states = [self._state(run, ends.get(run.name)) for run in self._runs]
        return self.states

    def standing(self) -> RankStatus:
        """Say how the study stands, by what was read last."""
        over = sum(s.status in OVER for s in self.states)
        bad = [s for s in self.states if s.status in ("refused", "failed")]
        if is_held(self.path) is True:
            return RankStatus("running", "", False)
        if over == len(self.states) and all(s.status != "stopped" for s in self.states):
            said = f"{len(bad)} run{'s were' if len(bad) > 1 else ' was'} refused or failed"
            return RankStatus("completed", said if bad else "", True)
        if any(s.status == "running" for s in self.states):
            return RankStatus("running", "", False)
        return RankStatus("stopped", f"continue with: echelon compare --run {self.path}", True)

    def overview(self) -> dict[str, Any]:
        """Return what the study's page shows, as plain values."""
        states, standing = self.refresh(), self.standing()
        done = sum(1.0 if s.status in OVER else s.progress.done for s in states) / max(1, len(states))
        return {
            "name": self.path.resolve().name, "status": standing.status, "message": standing.message,
            "over": standing.over, "what": f"{len(states)} runs, one after the other", "done": done,
            "runs_over": sum(s.status in OVER for s in states),
            "eta_s": None if standing.over else seconds_left(states), "runs": [self._row(s) for s in states],
        }  # fmt: skip

    def folder_of(self, name: str) -> Path | None:
        """Return the folder of a run, or None for a name that the study does not have, or a run that did not begin."""
        folder = run_folder(self.path, name)
        return folder if any(run.name == name for run in self._runs) and folder.is_dir() else None

    def _row(self, state: State) -> dict[str, Any]:
        run, p = state.run, state.progress
        return {
            "name": run.name, "candidate": run.candidate, "terms": run.terms, "seed": run.seed,
            "status": state.status, "message": state.message, "seconds": state.seconds, "done": p.done, "top1": p.top1,
            "samples_per_s": p.samples_per_s, "there": self.folder_of(run.name) is not None,
        }  # fmt: skip

    def _state(self, run: PlannedRun, end: RunEnd | None) -> State:
        folder = run_folder(self.path, run.name)
        if end is not None and is_held(folder) is not True:  # else it is tried again
            state = self._ended.get(run.name)
            if state is None or (state.status, state.seconds) != (end.status, end.seconds):
                state = State(run, end.status, end.seconds, Tail(folder).read(), end.message)
                self._ended[run.name] = state
            return state
        if not folder.is_dir():
            return State(run)
        live = self._live.setdefault(run.name, LiveRun(folder))
        live.refresh()
        return _seen(run, look(live))


def _seen(run: PlannedRun, s: Snapshot) -> State:
    """How a run stands that the study has not recorded the end of: a study cuts short what it was stopped in."""
    progress = Progress(s.done, s.top1, s.samples_per_s, s.total_steps)
    settled = s.status in OVER and s.status != "stopped"
    status = s.status if settled else (CUT_SHORT if s.over else "running")
    message = "it will be repeated from its start" if status == CUT_SHORT else s.message
    return State(run, status, s.elapsed_s or 0.0, progress, message)
