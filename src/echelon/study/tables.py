"""The study's two tables, one row per run and one per evaluation point, as CSV and as Parquet.

A metric is a column by its own name (`top1`, `rmse`), the best value of the primary one `best_NAME`.
"""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from echelon.core.errors import UserError
from echelon.core.files import write_atomic
from echelon.records.before_tasks import with_chance
from echelon.study.metric import UNRECORDED, PrimaryMetric

Row = TypeVar("Row", "RunRow", "PointRow")
Value = str | int | float | None
Cells = Mapping[str, Value]

RUNS, POINTS = "runs", "points"
PAUSE_REASONS = ("start", "evaluation", "checkpoint", "recording", "callbacks", "other")
_BY_METRIC = ("best", "metrics")  # fields whose columns have the name of a metric in them


@dataclass(frozen=True)
class RunRow:
    """One run. None where the record holds no answer; `phase_*` are seconds per step, mean over the ranks.

    Attributes:
        stage: what the run was for (a `Stage`).
        lr: its learning rate.
        run_s: from the first step to the end of the last evaluation or checkpoint: `train_s`, of steps alone, and the
            pauses (`pause_*`, seconds by reason). None in tables from before it was measured.
        whole_s: from the command to its end.
        threads: of a worker.
        affinity: the cores that its workers may run on (such as `0-3`; where they differ, each set once).
        metric: name of the primary metric; with `direction`, `metric_label`, `percent` and `chance` it is a
            `PrimaryMetric`.
        best: the best value of the primary metric.
        predicted_step_s, predicted_run_s: what the baseline's record of the same seed predicted for `step_s`, `run_s`.
        periods: chosen as the run went, each behind the step from which on it held, such as `0:4 12:18`.
        metrics: those of the last evaluation.
    """

    run: str
    candidate: str
    terms: str
    seed: int
    status: str
    message: str
    stage: str = ""
    lr: float | None = None
    train_s: float | None = None
    run_s: float | None = None
    whole_s: float | None = None
    startup_s: float | None = None
    steps: int | None = None
    epochs: float | None = None
    workers: int | None = None
    link: str | None = None
    threads: int | None = None
    affinity: str | None = None
    parameters: int | None = None
    eval_samples: int | None = None
    metric: str = UNRECORDED.name
    direction: str = UNRECORDED.direction
    metric_label: str = UNRECORDED.label
    percent: int = int(UNRECORDED.percent)
    chance: float | None = None
    best: float | None = None
    eval_loss: float | None = None
    nonfinite_step: int | None = None
    wire_bytes: float | None = None
    wire_bytes_per_step: float | None = None
    samples_per_s: float | None = None
    step_s: float | None = None
    exposed_s: float | None = None
    pause_start: float | None = None
    pause_evaluation: float | None = None
    pause_checkpoint: float | None = None
    pause_recording: float | None = None
    pause_callbacks: float | None = None
    pause_other: float | None = None
    phase_data: float | None = None
    phase_forward: float | None = None
    phase_backward: float | None = None
    phase_communicate: float | None = None
    phase_update: float | None = None
    phase_other: float | None = None
    memory_bytes: float | None = None
    memory_bytes_by_rank: str | None = None
    staleness: str | None = None
    staleness_mean: float | None = None
    density: float | None = None
    restarts: int | None = None
    periods: str | None = None
    predicted_step_s: float | None = None
    predicted_run_s: float | None = None
    target: float | None = None
    target_s: float | None = None
    target_bytes: float | None = None
    command: str | None = None
    metrics: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def primary(self) -> PrimaryMetric:
        """The metric that the run is compared by."""
        return PrimaryMetric(self.metric, self.direction, self.metric_label, bool(self.percent), self.chance)

    @property
    def end_s(self) -> float | None:
        """Seconds from the first step to the end, pauses counted; where that was not measured, of steps alone."""
        return self.train_s if self.run_s is None else self.run_s

    @property
    def pauses(self) -> dict[str, float]:
        """Seconds without steps, by reason."""
        known = {name: getattr(self, f"pause_{name}") for name in PAUSE_REASONS}
        return {name: seconds for name, seconds in known.items() if seconds}

    @property
    def final(self) -> float | None:
        """The primary metric at the last evaluation."""
        return self.eval_loss if self.metric == "loss" else self.metrics.get(self.metric)


@dataclass(frozen=True)
class PointRow:
    """One evaluation of one run: what had been spent by then, and what was reached. `metric` is the primary one.

    `seconds` are those since the first step, pauses counted.
    """

    run: str
    candidate: str
    terms: str
    seed: int
    point: int
    epoch: int
    step: int
    samples: float
    seconds: float
    wire_bytes: float
    loss: float | None
    metric: str = UNRECORDED.name
    metrics: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def value(self) -> float | None:
        """The primary metric."""
        return self.loss if self.metric == "loss" else self.metrics.get(self.metric)


def write_tables(folder: Path, runs: Sequence[RunRow], points: Sequence[PointRow]) -> None:
    """Write `runs.csv`, `runs.parquet`, `points.csv` and `points.parquet`, each atomically."""
    for name, rows, kind in ((RUNS, runs, RunRow), (POINTS, points, PointRow)):
        cells = [_cells_of(row) for row in rows]
        columns = _columns(kind, cells)
        write_atomic(folder / f"{name}.csv", _csv(cells, list(columns)))
        _write_parquet(folder / f"{name}.parquet", cells, columns)


def read_tables(folder: Path) -> tuple[list[RunRow], list[PointRow]]:
    """Read the Parquet tables back; empty ones where there is none yet.

    Raises:
        UserError: a table is torn, or of another version.
    """
    return _read(folder / f"{RUNS}.parquet", RunRow), _read(folder / f"{POINTS}.parquet", PointRow)


def _columns(kind: type, rows: Iterable[Cells]) -> dict[str, type]:
    """Return the type of each column: of the row's own fields, then of every metric that a row has."""
    types: dict[str, type] = {}
    for name, hint in get_type_hints(kind).items():
        plain = next((t for t in (getattr(hint, "__args__", None) or (hint,)) if t in (str, int, float)), None)
        if plain is not None and name not in _BY_METRIC:
            types[name] = plain
    return types | {name: float for cells in rows for name in cells if name not in types}


def _cells_of(row: RunRow | PointRow) -> Cells:
    """Return a row's cells by column, metrics under their own names."""
    cells = {name: value for name, value in asdict(row).items() if name not in _BY_METRIC}
    best = {f"best_{row.metric}": row.best} if isinstance(row, RunRow) and row.best is not None else {}
    return {**best, **row.metrics, **cells}


def _row_of(kind: type[Row], cells: Cells) -> Row:
    names, cells = {f.name for f in fields(kind)} - set(_BY_METRIC), with_chance(cells)
    values: dict[str, Any] = {name: value for name, value in cells.items() if name in names}
    metrics = {name: float(v) for name, v in cells.items() if name not in names and isinstance(v, int | float)}
    if kind is RunRow:
        best = {name: metrics.pop(name) for name in list(metrics) if name.startswith("best_")}
        values["best"] = best.get(f"best_{values.get('metric', UNRECORDED.name)}")
    return kind(**values, metrics=metrics)


def _csv(rows: Iterable[Cells], names: Sequence[str]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _write_parquet(path: Path, rows: Sequence[Cells], columns: Mapping[str, type]) -> None:
    import pyarrow
    from pyarrow import parquet

    types = {str: pyarrow.string(), int: pyarrow.int64(), float: pyarrow.float64()}
    table = pyarrow.Table.from_pylist(rows, schema=pyarrow.schema([(n, types[t]) for n, t in columns.items()]))
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            parquet.write_table(table, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _read(path: Path, kind: type[Row]) -> list[Row]:
    if not path.exists():
        return []
    import pyarrow
    from pyarrow import parquet

    try:
        table = parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(
            f"{path} cannot be read: {' '.join(str(error).split())}; remove it, the runs hold all"
        ) from None
    known = {f.name for f in fields(kind)}
    needed = {f.name for f in fields(kind) if f.default is MISSING and f.default_factory is MISSING}
    strange = [
        n for n, t in zip(table.schema.names, table.schema.types) if n not in known and pyarrow.types.is_string(t)
    ]
    if len(table) and (strange or not needed <= set(table.schema.names)):  # an older table lacks what was added since
        raise UserError(f"{path} was written by another version: remove it, the runs hold all that it held")
    return [_row_of(kind, cells) for cells in table.to_pylist()]
