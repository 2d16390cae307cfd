"""Write a study's tables, page and summary from what its runs recorded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from echelon.core.files import write_atomic
from echelon.reporting.report.records import load_run
from echelon.reporting.report.summary import finite
from echelon.reporting.report.tables import environment_table
from echelon.study.base import PlannedRun, Study
from echelon.study.compare import Comparison, Group, compare, set_targets
from echelon.study.execute import command_of
from echelon.study.file import STUDY_FILE, load_study
from echelon.study.folder import RunEnd, completed, read_ends, run_folder
from echelon.study.plan import planned_runs
from echelon.study.predictions import check_predictions, set_predictions
from echelon.study.recommend import Recommendation, recommend
from echelon.study.rows import COMPLETED, PointRow, RunRow, rows_of
from echelon.study.table import read_tables, write_tables
from echelon.study.words import MISSING, sentence, study_words

REPORT_FILE = "report.html"
SUMMARY_FILE = "summary.json"


@dataclass(frozen=True)
class StudyReport:
    """A study in rows, comparisons and words."""

    name: str
    study: Study
    runs: list[RunRow]
    points: list[PointRow]
    groups: list[Group]
    recommended: list[Recommendation]
    words: list[str]
    environment: Mapping[str, str]


def write_study(path: Path) -> StudyReport:
    """Write `runs` and `points` (CSV and Parquet), `summary.json` and `report.html` into a study's folder, atomically.

    Torn records, refused and failed runs and runs that are missing are survived and said. A run whose folder is gone
    keeps the row that it had.

    Raises:
        UserError: the folder holds no study, or a table of another version.
    """
    from echelon.study.page import render_study

    study = load_study(path / STUDY_FILE)
    runs, points = _collect(path, study)
    write_tables(path, runs, points)
    report = report_of(path.resolve().name, study, *read_tables(path), _environment(path, runs))
    write_atomic(path / SUMMARY_FILE, json.dumps(summary_of(report), indent=2, allow_nan=False) + "\n")
    page = render_study(report, (path / STUDY_FILE).read_text(encoding="utf-8"))
    write_atomic(path / REPORT_FILE, page.encode(errors="replace").decode())
    return report


def report_of(
    name: str, study: Study, runs: list[RunRow], points: list[PointRow], environment: Mapping[str, str]
) -> StudyReport:
    """Compare and conclude, from the tables alone."""
    groups = compare(study, runs)
    recommended = [recommend(study, group, runs) for group in groups]
    words = study_words(study, groups, recommended, runs)
    return StudyReport(name, study, runs, points, groups, recommended, words, environment)


def summary_of(report: StudyReport) -> dict[str, Any]:
    """What `summary.json` holds."""
    done = sum(r.status == COMPLETED for r in report.runs)
    cleaned = finite(
        {
            "study": report.name,
            "status": COMPLETED if done == len(report.runs) else "partial",
            "runs": {"planned": len(report.runs), COMPLETED: done},
            "baseline": report.study.baseline.label,
            "seeds": list(report.study.seeds),
            "comparisons": [
                {"target": group.target, **_comparison(c)} for group in report.groups for c in group.comparisons
            ],
            "predictions": [
                {**asdict(c), "off": c.off, "holds": c.holds} for c in check_predictions(report.study, report.runs)
            ],
            "recommendations": [asdict(r) for r in report.recommended],
            "words": report.words,
            "environment": dict(report.environment),
        }
    )
    assert isinstance(cleaned, dict)
    return cleaned


def _comparison(c: Comparison) -> dict[str, Any]:
    return {**asdict(c), "verdict": str(c.verdict), "sentence": sentence(c)}


def _collect(path: Path, study: Study) -> tuple[list[RunRow], list[PointRow]]:
    ends = read_ends(path)
    planned = planned_runs(study)
    gone = [run.name for run in planned if not run_folder(path, run.name).is_dir()]
    old_runs, old_points = read_tables(path) if gone else ([], [])
    kept = {row.run: row for row in old_runs if row.run in gone}
    runs: list[RunRow] = []
    points: list[PointRow] = [p for p in old_points if p.run in kept]
    for run in planned:
        end = ends.get(run.name)
        if run.name in kept and (end is None or kept[run.name].status == end.status):
            runs.append(kept[run.name])
            continue
        row, own = _row(path, run, ends)
        runs.append(replace(row, command=command_of(run, run_folder(path, run.name))))
        points += own
    return set_predictions(path, study, set_targets(study, runs, points)), points


def _row(path: Path, run: PlannedRun, ends: Mapping[str, RunEnd]) -> tuple[RunRow, list[PointRow]]:
    folder, end = run_folder(path, run.name), ends.get(run.name)
    if not folder.is_dir():
        status, why = (end.status, end.message) if end and end.status != COMPLETED else (MISSING, "")
        return RunRow(run.name, run.candidate, run.terms, run.seed, status, why), []
    if completed(folder):
        return rows_of(run, folder, COMPLETED, "")
    return rows_of(run, folder, end.status if end else "unfinished", end.message if end else "")


def _environment(path: Path, runs: list[RunRow]) -> dict[str, str]:
    """What the runs ran on, from the first that says it; of a study whose runs are gone, what its summary says."""
    for row in runs:
        folder = run_folder(path, row.run)
        table = environment_table(load_run(folder)) if row.status == COMPLETED and folder.is_dir() else None
        if table is not None:
            return {cells[0]: cells[1] for cells in table.rows}
    return _former_environment(path / SUMMARY_FILE)


def _former_environment(file: Path) -> dict[str, str]:
    try:
        known = json.loads(file.read_text(encoding="utf-8")).get("environment")
    except (FileNotFoundError, ValueError, AttributeError):
        return {}
    return {str(k): str(v) for k, v in known.items()} if isinstance(known, dict) else {}
