"""A run's record as typed pieces: attempts, windows of steps, evaluations, checkpoints, events.

What cannot be read is left out and said in `RunRecord.notes`, never guessed.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from echelon.core.errors import UserError
from echelon.records.file import RECORD_FILE, read_lines

T = TypeVar("T")
Json = dict[str, Any]

CONFIG_FILE = "config.yaml"
EVALUATION_FILE = "evaluation.json"
_BY_RANK = ("gc_s", "comm_busy_s", "comm_spread_s")


@dataclass(frozen=True)
class Window:
    """Consecutive steps reported together; `phases` holds seconds per rank and phase, summed over the window.

    Per rank, in seconds: `gc_s` in garbage collections, `comm_busy_s` in which communication was under way,
    `comm_spread_s` in which it could be hidden, `waits` for others in each step, `pauses` since the window before, by
    `pause_names`. Empty where they were not recorded. `density`: share of the encoded elements that rank 0 sent in its
    last message of the window, where a codec is sparse.
    """

    attempt: int
    t: float
    epoch: int
    step: int
    losses: tuple[float, ...]
    correct: float | None
    samples: int
    lr: float | None
    seconds: float
    phase_names: tuple[str, ...]
    phases: tuple[tuple[float, ...], ...]
    wire_bytes: float
    wire_bytes_by_group: dict[str, float] = field(default_factory=dict)
    memory_bytes: tuple[float, ...] = ()
    other_wire_bytes: float = 0.0
    gc_s: tuple[float, ...] = ()
    comm_busy_s: tuple[float, ...] = ()
    comm_spread_s: tuple[float, ...] = ()
    waits: tuple[tuple[float, ...], ...] = ()
    pause_names: tuple[str, ...] = ()
    pauses: tuple[tuple[float, ...], ...] = ()
    density: float | None = None

    @property
    def steps(self) -> int:
        """Number of steps in the window."""
        return len(self.losses)


@dataclass(frozen=True)
class Evaluation:
    """One pass over the evaluation samples."""

    attempt: int
    t: float
    epoch: int
    step: int
    loss: float | None
    metrics: dict[str, float]
    seconds: float
    samples: int


@dataclass(frozen=True)
class TimelineEntry:
    """Anything else with a moment: an event, a checkpoint, a start or an end, with what was recorded."""

    t: float
    kind: str
    details: Json

    @property
    def name(self) -> str:
        """An event's name; the kind for others."""
        return str(self.details.get("name", self.kind))

    @property
    def message(self) -> str:
        """An event's sentence, or nothing."""
        return str(self.details.get("message") or "")

    def number(self, key: str) -> float | None:
        """A recorded number, or None when it is absent or no number."""
        value = self.details.get(key)
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            return None
        return float(value)


@dataclass(frozen=True)
class RunRecord:
    """All that a run's folder says. `marks` holds starts, events, checkpoints and ends in the order written."""

    name: str
    config_text: str
    config: Json
    marks: tuple[TimelineEntry, ...]
    windows: tuple[Window, ...]
    evaluations: tuple[Evaluation, ...]
    detail: Json
    last_t: float | None
    notes: tuple[str, ...]

    def of_kind(self, kind: str) -> list[TimelineEntry]:
        """Marks of one kind: start, event, checkpoint or end."""
        return [m for m in self.marks if m.kind == kind]

    @property
    def served(self) -> bool:
        """Whether all that workers wait for is servers: they hold the parameters, and each worker has a whole model."""
        return any(str(m.details.get("backend")) == "zmq" and not _is_split(m) for m in self.of_kind("start"))

    @property
    def one_replica(self) -> bool:
        """Whether the ranks together held the model once: nothing that acts between replicas did anything."""
        layouts = [m.details.get("layout") for m in self.of_kind("start")]
        return bool(layouts) and all(isinstance(sizes, dict) and sizes and "dp" not in sizes for sizes in layouts)

    def setting(self, section: str, key: str) -> Any:
        """One value of the config, or None."""
        part = self.config.get(section)
        return part.get(key) if isinstance(part, dict) else None


def _is_split(start: TimelineEntry) -> bool:
    layout = start.details.get("layout")
    return isinstance(layout, dict) and any(size != 1 for axis, size in layout.items() if axis != "dp")


def load_run(run: Path) -> RunRecord:
    """Read a run's folder; missing, torn or strange parts are left out and noted.

    Raises:
        UserError: the folder does not exist.
    """
    if not run.is_dir():
        raise UserError(f"{run} is not a folder: name the folder of a run (runs/NAME), which holds {RECORD_FILE}")
    notes: list[str] = []
    config_text = _read_text(run / CONFIG_FILE, notes)
    raw = read_lines(run)
    _note_torn_lines(run / RECORD_FILE, len(raw), notes)
    marks, windows, evaluations = _sort_records(raw, notes)
    times = [m.t for m in marks] + [w.t for w in windows] + [e.t for e in evaluations]
    return RunRecord(
        name=run.resolve().name,
        config_text=config_text,
        config=_parse_config(config_text, notes),
        marks=tuple(marks),
        windows=tuple(windows),
        evaluations=tuple(evaluations),
        detail=_read_detail(run / EVALUATION_FILE, notes),
        last_t=max(times) if times else None,
        notes=tuple(notes),
    )


def surviving(items: tuple[T, ...], record: RunRecord, step_of: Callable[[T], tuple[int, int]]) -> list[T]:
    """Drop what a restart undid: items of an attempt past the step where a later attempt began.

    `step_of` gives an item's (attempt, step).
    """
    starts = [int(m.number("start_step") or 0) for m in record.of_kind("start")]
    kept = []
    for item in items:
        attempt, step = step_of(item)
        if all(step <= begun for begun in starts[attempt + 1 :]):
            kept.append(item)
    return kept


def _sort_records(raw: list[Json], notes: list[str]) -> tuple[list[TimelineEntry], list[Window], list[Evaluation]]:
    marks: list[TimelineEntry] = []
    windows: list[Window] = []
    evaluations: list[Evaluation] = []
    attempt, unreadable = -1, 0
    for record in raw:
        try:
            if record["kind"] == "steps":
                windows.append(_window(record, max(attempt, 0)))
            elif record["kind"] == "evaluation":
                evaluations.append(_evaluation(record, max(attempt, 0)))
            else:
                attempt += record["kind"] == "start"
                marks.append(TimelineEntry(_time(record), str(record["kind"]), record))
        except (KeyError, TypeError, ValueError):
            unreadable += 1
    if unreadable:
        notes.append(f"{unreadable} of {len(raw)} entries of {RECORD_FILE} are not what their kind needs: left out.")
    return marks, windows, evaluations


def _window(r: Json, attempt: int) -> Window:
    phase_names = tuple(str(n) for n in r.get("phase_names") or ())
    phases = tuple(tuple(_finite(s) for s in rank) for rank in r.get("phases") or ())
    if any(len(rank) != len(phase_names) for rank in phases):
        raise ValueError("phases do not match phase_names")
    losses = tuple(_number(x) for x in r["losses"])
    if not losses:
        raise ValueError("a window without steps")
    pause_names = tuple(str(n) for n in r.get("pause_names") or ())
    each = {key: tuple(_finite(s) for s in r.get(key) or ()) for key in _BY_RANK}
    return Window(
        attempt=attempt,
        t=_time(r),
        epoch=int(r.get("epoch") or 0),
        step=int(r["step"]),
        losses=losses,
        correct=None if r.get("correct") is None else float(r["correct"]),
        samples=int(r.get("samples") or 0),
        lr=None if r.get("lr") is None else float(r["lr"]),
        seconds=_finite(r["seconds"]),
        phase_names=phase_names,
        phases=phases,
        wire_bytes=float(r.get("wire_bytes") or 0),
        other_wire_bytes=float(r.get("other_wire_bytes") or 0),
        wire_bytes_by_group={str(k): float(v) for k, v in (r.get("wire_bytes_by_group") or {}).items()},
        density=None if r.get("density") is None else _finite(r["density"]),
        memory_bytes=tuple(float(b) for b in r.get("memory_bytes") or ()),
        waits=_rows(r.get("waits"), len(losses), len(phases)),
        pause_names=pause_names,
        pauses=_rows(r.get("pauses"), len(pause_names), len(phases)),
        **{key: column if len(column) == len(phases) else () for key, column in each.items()},
    )


def _rows(value: Any, width: int, ranks: int) -> tuple[tuple[float, ...], ...]:
    """Read one row of numbers per rank; nothing where they are not of that shape."""
    rows = tuple(tuple(_finite(s) for s in row) for row in value or ())
    return rows if len(rows) == ranks and all(len(row) == width for row in rows) else ()


def _evaluation(r: Json, attempt: int) -> Evaluation:
    metrics = {str(k): float(v) for k, v in (r.get("metrics") or {}).items() if isinstance(v, int | float)}
    loss = None if r.get("loss") is None else float(r["loss"])
    return Evaluation(
        attempt=attempt,
        t=_time(r),
        epoch=int(r.get("epoch") or 0),
        step=int(r["step"]),
        loss=loss,
        metrics=metrics,
        seconds=_finite(r.get("seconds") or 0),
        samples=int(r.get("samples") or 0),
    )


def _number(value: Any) -> float:
    return float("nan") if value is None else float(value)


def _time(record: Json) -> float:
    return _finite(record["t"])


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError("not a finite number")
    return number


def _read_text(path: Path, notes: list[str]) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        notes.append(f"{path.name} is missing.")
        return ""


def _parse_config(text: str, notes: list[str]) -> Json:
    try:
        config = yaml.safe_load(text) if text else {}
    except yaml.YAMLError:
        notes.append(f"{CONFIG_FILE} is not readable as YAML.")
        return {}
    return config if isinstance(config, dict) else {}


def _read_detail(path: Path, notes: list[str]) -> Json:
    try:
        detail = json.loads(path.read_bytes())
    except FileNotFoundError:
        return {}
    except ValueError:
        detail = None
    if not isinstance(detail, dict):
        notes.append(f"{path.name} is torn or not JSON: confusion matrix and ROC are left out.")
        return {}
    return detail


def _note_torn_lines(path: Path, n_whole: int, notes: list[str]) -> None:
    if not path.exists():
        notes.append(f"{RECORD_FILE} is missing: nothing is known of the run's steps.")
        return
    with path.open("rb") as file:
        torn = sum(1 for line in file if line.strip()) - n_whole
    if torn:
        notes.append(f"{torn} torn line{'s' * (torn > 1)} of {RECORD_FILE} left out (a crash cut a write short).")
