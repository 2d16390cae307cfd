"""Write a study's tables, page and summary from what its runs recorded."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from echelon.core.files import write_atomic
from echelon.reporting.report.page import compile_templates
from echelon.reporting.report.records import load_run
from echelon.reporting.report.tables import environment_table
from echelon.study.base import COMPLETED
from echelon.study.clock import end_command, study_time
from echelon.study.collect import collect
from echelon.study.file import STUDY_FILE, load_study
from echelon.study.folder import run_folder
from echelon.study.report import StudyReport, report_of, to_json
from echelon.study.tables import RunRow, read_tables, write_tables

REPORT_FILE = "report.html"
SUMMARY_FILE = "summary.json"


def write_study(path: Path, ends: bool = False) -> StudyReport:
    """Write `runs` and `points` (CSV and Parquet), `summary.json` and `report.html` into a study's folder, atomically.

    Torn records, refused and failed runs and runs that are missing are left out, and the words say so. A run whose
    folder is gone keeps the row that it had.

    Args:
        ends: record that the study's command ends now: once what takes long of this is done, so that it does.

    Raises:
        UserError: the folder holds no study, or a table of another version.
    """
    from echelon.study.page.render import render_study

    study = load_study(path / STUDY_FILE)
    runs, points = collect(path, study)
    write_tables(path, runs, points)
    known, environment = read_tables(path), _environment(path, runs)
    with_page = {row.run for row in runs if (run_folder(path, row.run) / REPORT_FILE).is_file()}
    compile_templates()
    if ends:
        end_command(path)
    report = report_of(path.resolve().name, study, *known, environment, study_time(path))
    write_atomic(path / SUMMARY_FILE, to_json(report))
    page = render_study(report, (path / STUDY_FILE).read_text(encoding="utf-8"), with_page)
    write_atomic(path / REPORT_FILE, page.encode(errors="replace").decode())
    return report


def _environment(path: Path, runs: Sequence[RunRow]) -> dict[str, str]:
    """Return what the first completed run recorded of its machine; where the runs are gone, what `summary.json` has."""
    for row in runs:
        folder = run_folder(path, row.run)
        table = environment_table(load_run(folder)) if row.status == COMPLETED and folder.is_dir() else None
        if table is not None:
            return {cells[0]: cells[1] for cells in table.rows}
    return _environment_before(path / SUMMARY_FILE)


def _environment_before(summary: Path) -> dict[str, str]:
    try:
        known = json.loads(summary.read_text(encoding="utf-8")).get("environment")
    except (FileNotFoundError, ValueError, AttributeError):
        return {}
    return {str(k): str(v) for k, v in known.items()} if isinstance(known, dict) else {}
