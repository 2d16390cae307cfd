"""A study compared and concluded, from its tables alone; and the same as `summary.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from echelon.core.json_values import finite
from echelon.study.base import COMPLETED, Study
from echelon.study.compare import ComparisonGroup, compare
from echelon.study.predictions import PredictionCheck, check_predictions
from echelon.study.recommend import Recommendation, recommend
from echelon.study.tables import PointRow, RunRow
from echelon.study.words import sentence, study_words


@dataclass(frozen=True)
class StudyReport:
    """A study in rows, comparisons and words."""

    name: str
    study: Study
    runs: list[RunRow]
    points: list[PointRow]
    groups: list[ComparisonGroup]
    predictions: list[PredictionCheck]
    recommended: list[Recommendation]
    words: list[str]
    environment: Mapping[str, str]

    @property
    def completed(self) -> int:
        """Number of runs that completed."""
        return sum(r.status == COMPLETED for r in self.runs)


def report_of(
    name: str, study: Study, runs: list[RunRow], points: list[PointRow], environment: Mapping[str, str]
) -> StudyReport:
    """Compare the candidates and conclude, from the tables alone."""
    groups = compare(study, runs)
    recommended = [recommend(study, group, runs) for group in groups]
    words = study_words(study, groups, recommended, runs)
    predictions = check_predictions(study, runs)
    return StudyReport(name, study, runs, points, groups, predictions, recommended, words, environment)


def to_json(report: StudyReport) -> str:
    """Return the text of `summary.json`; numbers that are not finite become null."""
    values = {
        "study": report.name,
        "status": COMPLETED if report.completed == len(report.runs) else "partial",
        "runs": {"planned": len(report.runs), COMPLETED: report.completed},
        "baseline": report.study.baseline.label,
        "seeds": list(report.study.seeds),
        "comparisons": [
            {"target": group.target, **asdict(c), "verdict": str(c.verdict), "sentence": sentence(c, group.metric)}
            for group in report.groups
            for c in group.comparisons
        ],
        "predictions": [{**asdict(p), "off": p.off, "holds": p.holds} for p in report.predictions],
        "recommendations": [asdict(r) for r in report.recommended],
        "words": report.words,
        "environment": dict(report.environment),
    }
    return json.dumps(finite(values), indent=2, allow_nan=False) + "\n"
