"""A study watched from outside: which run goes on, how far each is, read from its folder alone."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from echelon.launch.places.cluster import PlaceFiles
from echelon.records.going import is_held
from echelon.records.segments import RECORD_FILE
from echelon.reporting.live.snapshot import look
from echelon.reporting.live.state import LiveRun
from echelon.study.base import COMPLETED, PlannedRun
from echelon.study.file import STUDY_FILE, load_study
from echelon.study.folder import SETTLED, RunEnd, read_ends, run_folder
from echelon.study.progress import CUT_SHORT, Progress, RunStatus, progress_at_end, running_at_once, seconds_left
from echelon.study.stages import all_runs

OVER = (COMPLETED, *SETTLED, "stopped")


@dataclass(frozen=True)
class StudyStatus:
    """Status of a whole study; `over`: nothing more will come unless it is continued."""

    status: str
    message: str
    over: bool


@dataclass(frozen=True)
class OverviewRow:
    """One run on the study's live page; `there`: its folder exists, so that its own page can be shown."""

    name: str
    candidate: str
    terms: str
    seed: int
    status: str
    message: str
    seconds: float
    done: float
    value: float | None
    samples_per_s: float | None
    there: bool


@dataclass(frozen=True)
class Overview:
    """What the study's live page shows; `done` is a share of all runs, `eta_s` None once the study is over."""

    name: str
    status: str
    message: str
    over: bool
    what: str
    done: float
    runs_over: int
    eta_s: float | None
    runs: tuple[OverviewRow, ...]


class StudyWatch:
    """Follows a study's folder; each `refresh` reads what is new.

    Raises:
        UserError: the study's description cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._described = -1.0
        self._runs: list[PlannedRun] = []
        self._read_description()
        self._ended: dict[str, RunStatus] = {}
        self._live: dict[str, LiveRun] = {}
        self.states = [RunStatus(run) for run in self._runs]

    def refresh(self) -> list[RunStatus]:
        """Return the state of each run now, in their order."""
        self._read_description()
        ends = read_ends(self.path)
        self.states = [self._state(run, ends.get(run.name)) for run in self._runs]
        return self.states

    def _read_description(self) -> None:
        """Read which runs there are, again where the study has chosen more of them since."""
        written = (self.path / STUDY_FILE).stat().st_mtime if (self.path / STUDY_FILE).exists() else 0.0
        if written != self._described:
            self._runs, self._described = all_runs(load_study(self.path / STUDY_FILE)), written

    def status(self) -> StudyStatus:
        """Return the status of the study, by what was read last."""
        over = sum(s.status in OVER for s in self.states)
        bad = sum(s.status in SETTLED for s in self.states)
        if is_held(self.path) is True:
            return StudyStatus("running", "", False)
        if over == len(self.states) and all(s.status != "stopped" for s in self.states):
            message = f"{bad} run{'s were' if bad > 1 else ' was'} refused or failed" if bad else ""
            return StudyStatus(COMPLETED, message, True)
        if any(s.status == "running" for s in self.states):
            return StudyStatus("running", "", False)
        return StudyStatus("stopped", f"continue with: echelon compare --run {self.path}", True)

    def overview(self) -> Overview:
        """Return what the study's page shows now."""
        states, now = self.refresh(), self.status()
        return Overview(
            name=self.path.resolve().name,
            status=now.status,
            message=now.message,
            over=now.over,
            what=f"{len(states)} runs",
            done=sum(1.0 if s.status in OVER else s.progress.done for s in states) / max(1, len(states)),
            runs_over=sum(s.status in OVER for s in states),
            eta_s=None if now.over else seconds_left(states) / running_at_once(states),
            runs=tuple(self._row(s) for s in states),
        )

    def folder_of(self, name: str) -> Path | None:
        """Return the folder of a run, or None for a name that the study does not have, or a run that did not begin."""
        folder = run_folder(self.path, name)
        return folder if any(run.name == name for run in self._runs) and folder.is_dir() else None

    def _row(self, state: RunStatus) -> OverviewRow:
        run, p = state.run, state.progress
        return OverviewRow(
            run.name, run.candidate, run.terms, run.seed, state.status, state.message, state.seconds, p.done, p.value,
            p.samples_per_s, self.folder_of(run.name) is not None,
        )  # fmt: skip

    def _state(self, run: PlannedRun, end: RunEnd | None) -> RunStatus:
        folder = run_folder(self.path, run.name)
        if end is not None and is_held(folder) is not True:  # else it is tried again
            state = self._ended.get(run.name)
            if state is None or (state.status, state.seconds) != (end.status, end.seconds):
                state = RunStatus(run, end.status, end.seconds, progress_at_end(folder), end.message, end.waited_s)
                self._ended[run.name] = state
            return state
        if not folder.is_dir() or (PlaceFiles(folder).job() and not (folder / RECORD_FILE).exists()):
            return RunStatus(run)  # in the latter case a cluster's queue has it
        live = self._live.setdefault(run.name, LiveRun(folder))
        live.refresh()
        return _unrecorded(run, live)


def _unrecorded(run: PlannedRun, live: LiveRun) -> RunStatus:
    """Return the state of a run whose end the study has not recorded: it goes on, or the study was stopped in it."""
    snapshot = look(live)
    shown = snapshot.done, snapshot.value, snapshot.samples_per_s, snapshot.total_steps
    progress = Progress(*shown, live.state.task.primary)
    settled = snapshot.status in OVER and snapshot.status != "stopped"
    status = snapshot.status if settled else (CUT_SHORT if snapshot.over else "running")
    message = "it will be repeated from its start" if status == CUT_SHORT else snapshot.message
    return RunStatus(run, status, snapshot.elapsed_s or 0.0, progress, message)
