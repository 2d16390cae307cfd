"""The study's two tables, as CSV and as Parquet: one row per run, one per evaluation point."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Sequence
from dataclasses import MISSING, asdict, fields
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

from echelon.core.errors import UserError
from echelon.core.files import write_atomic
from echelon.study.rows import PointRow, RunRow, names_of

Row = TypeVar("Row", RunRow, PointRow)

RUNS, POINTS = "runs", "points"


def write_tables(folder: Path, runs: Sequence[RunRow], points: Sequence[PointRow]) -> None:
    """Write `runs.csv`, `runs.parquet`, `points.csv` and `points.parquet`, each atomically."""
    for name, rows, kind in ((RUNS, runs, RunRow), (POINTS, points, PointRow)):
        values = [asdict(row) for row in rows]
        write_atomic(folder / f"{name}.csv", _csv(values, names_of(kind)))
        _write_parquet(folder / f"{name}.parquet", values, kind)


def read_tables(folder: Path) -> tuple[list[RunRow], list[PointRow]]:
    """Read the Parquet tables back; empty ones where there is none yet.

    Raises:
        UserError: a table is torn, or of another version.
    """
    return _read(folder / f"{RUNS}.parquet", RunRow), _read(folder / f"{POINTS}.parquet", PointRow)


def _csv(rows: list[dict[str, Any]], names: list[str]) -> str:
    text = io.StringIO()
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _write_parquet(path: Path, rows: list[dict[str, Any]], kind: type) -> None:
    import pyarrow
    from pyarrow import parquet

    table = pyarrow.Table.from_pylist(rows, schema=_schema(kind))
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            parquet.write_table(table, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _schema(kind: type) -> Any:
    import pyarrow

    types = {str: pyarrow.string(), int: pyarrow.int64(), float: pyarrow.float64()}
    hints = get_type_hints(kind)
    columns = []
    for name in names_of(kind):
        plain = next(t for t in (getattr(hints[name], "__args__", None) or (hints[name],)) if t in types)
        columns.append((name, types[plain]))
    return pyarrow.schema(columns)


def _read(path: Path, kind: type[Row]) -> list[Row]:
    if not path.exists():
        return []
    import pyarrow
    from pyarrow import parquet

    try:
        rows = parquet.read_table(path).to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(
            f"{path} cannot be read: {' '.join(str(error).split())}; remove it, the runs hold all"
        ) from None
    known = {f.name for f in fields(kind)}
    needed = {f.name for f in fields(kind) if f.default is MISSING}  # an older table lacks what is recorded since
    if rows and not needed <= set(rows[0]) <= known:
        raise UserError(f"{path} was written by another version: remove it, the runs hold all that it held")
    return [kind(**row) for row in rows]
