"""A run's folder as typed pieces: its record sorted by type and attempt, its description, its last evaluation.

What cannot be read is left out and said in `RunRecord.notes`, never guessed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from echelon.config.yaml_file import plain, read_yaml
from echelon.core.errors import UserError
from echelon.core.figure import ReportSection
from echelon.core.files import open_plain
from echelon.core.rate_search import LR_FIND
from echelon.core.task import BEFORE_TASKS, TaskFacts
from echelon.observe.phases import PAUSES
from echelon.records.decode import decode
from echelon.records.events import Event
from echelon.records.file import Detail, RecordReader
from echelon.records.kinds import End, Evaluation, Record, ServerWindow, Start, Steps, WorkerWindow
from echelon.records.segments import RECORD_FILE, segments_of
from echelon.tasks.classification_report import class_sections

T = TypeVar("T", bound=Record)

CONFIG_FILE = "config.yaml"
EVALUATION_FILE = "evaluation.json"


@dataclass(frozen=True)
class Attempt:
    """What lies between one start and the next; a record that lacks its first start begins with an attempt as well.

    Attributes:
        last_step: up to which a later attempt went on from it; infinite: nothing of it was undone.
    """

    windows: Sequence[Steps]
    evaluations: Sequence[Evaluation]
    last_step: float

    def kept_windows(self) -> list[Steps]:
        """Windows that no later attempt undid; one that reaches past a restart's step is dropped."""
        return [window for window in self.windows if window.step <= self.last_step]

    def kept_evaluations(self) -> list[Evaluation]:
        """Evaluations that no later attempt undid."""
        return [evaluation for evaluation in self.evaluations if evaluation.step <= self.last_step]


@dataclass(frozen=True)
class StoredEvaluation:
    """What `evaluation.json` holds of the best evaluation, for summaries and for the page.

    Attributes:
        step: after which it was; None: not known.
    """

    metrics: Mapping[str, float] = field(default_factory=dict)
    sections: Sequence[ReportSection] = ()
    step: int | None = None


@dataclass(frozen=True)
class RunRecord:
    """All that a run's folder says; `records` in the order written; `folder` as its reader named it."""

    name: str
    records: Sequence[Record] = ()
    config_text: str = ""
    config: Mapping[str, object] = field(default_factory=dict)
    evaluation: StoredEvaluation = StoredEvaluation()
    notes: Sequence[str] = ()
    folder: str = ""

    @cached_property
    def _by_type(self) -> dict[type[Record], list[Any]]:
        sorted_: dict[type[Record], list[Any]] = {}
        for record in self.records:
            sorted_.setdefault(Steps if isinstance(record, Steps) else type(record), []).append(record)
            if isinstance(record, Event) and type(record) is not Event:
                sorted_.setdefault(Event, []).append(record)
        return sorted_

    def of(self, kind: type[T]) -> list[T]:
        """Return the records of a type in order; of `Event`, those of all names."""
        return self._by_type.get(kind, [])

    @property
    def windows(self) -> list[Steps]:
        """All windows of steps, those that a restart undid included."""
        return self.of(Steps)

    @property
    def task(self) -> TaskFacts:
        """What was learnt."""
        return self.last_start.task if self.last_start else BEFORE_TASKS

    @property
    def searched(self) -> bool:
        """Whether the run has searched the learning rate (`--lr-find`), and trained nothing."""
        ends = self.of(End)
        return bool(ends) and ends[-1].reason == LR_FIND

    @property
    def last_start(self) -> Start | None:
        """Where the last attempt began."""
        return self.of(Start)[-1] if self.of(Start) else None

    @property
    def last_t(self) -> float | None:
        """The latest moment in the record (unix seconds)."""
        return max((record.t for record in self.records), default=None)

    @cached_property
    def attempts(self) -> list[Attempt]:
        """Windows and evaluations by attempt."""
        first_steps = [start.start_step for start in self.of(Start)]
        windows: list[list[Steps]] = [[] for _ in first_steps or [0]]
        evaluations: list[list[Evaluation]] = [[] for _ in windows]
        attempt = -1
        for record in self.records:
            if isinstance(record, Start):
                attempt += 1
            elif isinstance(record, Steps):
                windows[max(attempt, 0)].append(record)
            elif isinstance(record, Evaluation):
                evaluations[max(attempt, 0)].append(record)
        # Of a round that survivors train again the record has the first time: an attempt begins with its first line.
        begun = [w[0].step - w[0].count if w else s for w, s in zip(windows, first_steps or [0], strict=True)]
        begun = [max(line, start) for line, start in zip(begun, first_steps or [0], strict=True)]
        last = [min(begun[i + 1 :], default=math.inf) for i in range(len(windows))]
        return [Attempt(*parts) for parts in zip(windows, evaluations, last, strict=True)]

    def kept_windows(self) -> list[Steps]:
        """Windows of the trajectory that survived restarts."""
        return [window for attempt in self.attempts for window in attempt.kept_windows()]

    def kept_evaluations(self) -> list[Evaluation]:
        """Evaluations of the trajectory that survived restarts."""
        return [evaluation for attempt in self.attempts for evaluation in attempt.kept_evaluations()]

    @property
    def has_servers(self) -> bool:
        """Whether servers hold the parameters: the ranks are workers."""
        return bool(self.of(ServerWindow)) or any(start.served for start in self.of(Start))

    @property
    def waits_for_servers(self) -> bool:
        """Whether all that workers wait for is servers: they hold the parameters, and each worker has a whole model."""
        return self.has_servers and not any(start.splits_model for start in self.of(Start))

    @property
    def waits_for_all(self) -> bool:
        """Whether each step needs all ranks; servers' workers then have the same clock whenever it is told."""
        clocks = [set(window.clocks.values()) for window in self.of(WorkerWindow)]
        return not self.has_servers or all(len(of_workers) < 2 for of_workers in clocks)

    @property
    def one_replica(self) -> bool:
        """Whether the ranks together held the model once: nothing that acts between replicas did anything."""
        layouts = [start.layout for start in self.of(Start)]
        return bool(layouts) and all(sizes and "dp" not in sizes for sizes in layouts)

    def setting(self, section: str, key: str) -> Any:
        """One value of the config, or None."""
        values = self.config.get(section)
        return values.get(key) if isinstance(values, dict) else None

    def rank_host(self, rank: int) -> str:
        """The host a rank ran on in the last attempt, or nothing when the record lists hosts otherwise."""
        start = self.last_start
        if start is None or not start.hosts:
            return ""
        if len(start.hosts) == 1:
            return start.hosts[0]
        rows = len(self.windows[-1].phases) if self.windows else start.world_size
        return (
            start.hosts[rank] if rank < len(start.hosts) == rows else ""
        )  # workers may have come or gone, or be split


def load_run(run: Path) -> RunRecord:
    """Read a run's folder; missing, torn or strange parts are left out and noted.

    Raises:
        UserError: the folder does not exist.
    """
    if not run.is_dir():
        raise UserError(f"{run} is not a folder: name the folder of a run (runs/NAME), which holds {RECORD_FILE}")
    notes: list[str] = []
    config_text = _read_text(run / CONFIG_FILE, notes)
    records = _read_all(run, notes)
    config = _read_config(run / CONFIG_FILE, notes)
    evaluation = _read_evaluation(run / EVALUATION_FILE, records, notes)
    return RunRecord(run.resolve().name, records, config_text, config, evaluation, notes, str(run))


def _read_all(run: Path, notes: list[str]) -> list[Record]:
    reader = RecordReader(run, detail=Detail.THINNED)
    records = reader.read(to_end=True)[1]
    if not (run / RECORD_FILE).exists() and not segments_of(run):
        notes.append(f"{RECORD_FILE} is missing: nothing is known of the run's steps.")
    if reader.torn:
        lines = f"{reader.torn} torn line{'s' * (reader.torn > 1)}"
        notes.append(f"{lines} of {RECORD_FILE} left out (a crash cut a write short).")
    if reader.unreadable:
        share = f"{reader.unreadable} of {reader.lines - reader.torn} entries of {RECORD_FILE}"
        notes.append(f"{share} are not what their kind needs: left out.")
    if reader.unreadable_rows:
        rows = f"{reader.unreadable_rows} row{'s' * (reader.unreadable_rows > 1)} within entries of {RECORD_FILE}"
        notes.append(f"{rows} not what they should be: left out.")
    return with_pauses_apart(records)


def with_pauses_apart(records: Sequence[Record]) -> list[Record]:
    """Return records in which no window tells of pauses among its phases, as earlier runs with servers did.

    A worker told of a pause with its next step, and the seconds of the windows that it had lasted over held it: they
    become the seconds of steps that a worker had, the mean of the workers, as later runs write them.
    """
    found, before = list(records), list[int]()  # places of windows of the same workers
    for place, line in enumerate(records):
        if isinstance(line, Start):
            before = []
        if not isinstance(line, Steps) or not line.phases:
            continue
        if before and len(_steps(records[before[-1]]).phases) != len(line.phases):
            before = []
        before.append(place)
        paused = [i for i, name in enumerate(line.phase_names) if name in PAUSES]
        if not paused:
            continue
        kept = [i for i in range(len(line.phase_names)) if i not in paused]
        found[place] = replace(
            line,
            phase_names=[line.phase_names[i] for i in kept],
            phases=[[row[i] for i in kept] for row in line.phases],
            pause_names=[line.phase_names[i] for i in paused],
            pauses=[[row[i] for i in paused] for row in line.phases],
        )
        for rank, row in enumerate(line.phases):
            _take_out(found, before, rank, sum(row[i] for i in paused))
    return found


def _take_out(records: list[Record], places: Sequence[int], rank: int, paused_s: float) -> None:
    """Take a pause of a worker out of the latest windows in which it was not busy, and what is left out of any."""
    for busy in (True, False):
        for place in reversed(places):
            if paused_s <= 1e-9:
                return
            window = _steps(records[place])
            room_s = window.seconds - (sum(window.phases[rank]) if busy else 0.0)
            taken_s = min(paused_s, max(0.0, room_s))
            records[place] = replace(window, seconds=window.seconds - taken_s / len(window.phases))
            paused_s -= taken_s


def _steps(record: Record) -> Steps:
    assert isinstance(record, Steps)
    return record


def _read_text(path: Path, notes: list[str]) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        notes.append(f"{path.name} is missing.")
        return ""


def _read_config(file: Path, notes: list[str]) -> Mapping[str, object]:
    if not file.exists():
        return {}
    try:
        node = read_yaml(file)
        config = {} if node is None else plain(node, CONFIG_FILE)
    except UserError:
        notes.append(f"{CONFIG_FILE} is not readable as YAML.")
        return {}
    return config if isinstance(config, dict) else {}


def _read_evaluation(path: Path, records: Sequence[Record], notes: list[str]) -> StoredEvaluation:
    try:
        with open_plain(path) as file:
            values = json.loads(file.read())
        if "sections" in values:
            sections = [decode(ReportSection, section) for section in values["sections"]]
        else:
            sections = _sections_before_tasks(values, records)
    except FileNotFoundError:
        return StoredEvaluation()
    except (UserError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        notes.append(f"{path.name} is torn or not JSON: its charts and tables are left out.")
        return StoredEvaluation()
    metrics = values.get("metrics")
    numbers = metrics.items() if isinstance(metrics, dict) else ()
    step = values.get("step")
    shown = {name: v for name, v in numbers if isinstance(v, int | float)}
    return StoredEvaluation(shown, sections, step if isinstance(step, int) else None)


def _sections_before_tasks(values: Mapping[str, object], records: Sequence[Record]) -> list[ReportSection]:
    """Return the sections of an evaluation that holds none: earlier versions classified, and kept what charts need."""
    start = next((record for record in reversed(records) if isinstance(record, Start)), None)
    return class_sections(values, start.classes if start else ())
