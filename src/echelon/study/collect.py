"""Rows of all runs of a study, from their folders, or from the tables where these are gone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from echelon.study.base import COMPLETED, PlannedRun, Stage, Study
from echelon.study.compare import set_targets
from echelon.study.folder import RunEnd, command_of, completed, read_ends, run_folder
from echelon.study.predictions import set_predictions
from echelon.study.rows import rows_of
from echelon.study.stages import all_runs
from echelon.study.tables import PointRow, RunRow, read_tables

MISSING = "missing"


def collect(path: Path, study: Study) -> tuple[list[RunRow], list[PointRow]]:
    """Return rows of all runs of a study, and of their evaluations; a run whose folder is gone keeps the row it had.

    Raises:
        UserError: a table of another version.
    """
    ends = read_ends(path)
    planned = all_runs(study)
    gone = [run.name for run in planned if not run_folder(path, run.name).is_dir()]
    old_runs, old_points = read_tables(path) if gone else ([], [])
    old = {row.run: row for row in old_runs if row.run in gone}
    runs: list[RunRow] = []
    points: list[PointRow] = [p for p in old_points if p.run in old]
    for run in planned:
        end = ends.get(run.name)
        if run.name in old and (end is None or old[run.name].status == end.status):
            runs.append(old[run.name])
            continue
        row, run_points = _row(path, run, ends)
        runs.append(replace(row, command=command_of(run, run_folder(path, run.name)), stage=run.stage))
        points += run_points
    compared = {row.run: row for row in set_predictions(path, study, set_targets(study, main_rows(runs), points))}
    return [compared.get(row.run, row) for row in runs], points


def main_rows(rows: Sequence[RunRow]) -> list[RunRow]:
    """Return the rows of the comparison by epochs."""
    return [row for row in rows if row.stage == Stage.EPOCHS]


def _row(path: Path, run: PlannedRun, ends: Mapping[str, RunEnd]) -> tuple[RunRow, list[PointRow]]:
    folder, end = run_folder(path, run.name), ends.get(run.name)
    if not folder.is_dir():
        status, why = (end.status, end.message) if end and end.status != COMPLETED else (MISSING, "")
        return RunRow(run.name, run.candidate, run.terms, run.seed, status, why), []
    if completed(folder):
        return rows_of(run, folder, COMPLETED, "")
    return rows_of(run, folder, end.status if end else "unfinished", end.message if end else "")
