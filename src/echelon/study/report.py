"""A study compared and concluded, from its tables alone; and the same as `summary.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from echelon.core.json_values import finite
from echelon.study.base import COMPLETED, Stage, Study
from echelon.study.clock import StudyTime
from echelon.study.compare import ComparisonGroup, compare
from echelon.study.equal_time import TimeGroup, compare_in_time, time_words
from echelon.study.predictions import NotPredicted, PredictionCheck, check_predictions, not_predicted
from echelon.study.recommend import Recommendation, recommend
from echelon.study.stages import rate_words
from echelon.study.tables import PointRow, RunRow
from echelon.study.words import sentence, study_words


@dataclass(frozen=True)
class StudyReport:
    """A study in rows, comparisons and words.

    Attributes:
        runs: of the comparison by epochs; `apart` are those that looked for learning rates or are of equal time.
        took: the time of its commands; None: not recorded.
    """

    name: str
    study: Study
    runs: list[RunRow]
    points: list[PointRow]
    groups: list[ComparisonGroup]
    predictions: list[PredictionCheck]
    recommended: list[Recommendation]
    words: list[str]
    environment: Mapping[str, str]
    apart: Sequence[RunRow] = ()
    times: Sequence[TimeGroup] = ()
    unpredicted: Sequence[NotPredicted] = ()
    took: StudyTime | None = None

    @property
    def all_runs(self) -> list[RunRow]:
        """Runs of all stages."""
        return [*self.runs, *self.apart]

    @property
    def completed(self) -> int:
        """Number of runs that completed."""
        return sum(r.status == COMPLETED for r in self.all_runs)


def report_of(
    name: str,
    study: Study,
    runs: list[RunRow],
    points: list[PointRow],
    environment: Mapping[str, str],
    took: StudyTime | None = None,
) -> StudyReport:
    """Compare the candidates and conclude, from the tables alone."""
    apart = [row for row in runs if row.stage != Stage.EPOCHS]
    runs = [row for row in runs if row.stage == Stage.EPOCHS]
    groups = compare(study, runs)
    recommended = [recommend(study, group, runs) for group in groups]
    times = compare_in_time(study, [*runs, *apart])
    words = study_words(study, groups, recommended, runs) + time_words(study, times) + rate_words(study, apart)
    words[1:1] = [took.says] if took else []
    predictions, others = check_predictions(study, runs), not_predicted(study, runs)
    return StudyReport(
        name, study, runs, points, groups, predictions, recommended, words, environment, apart, times, others, took
    )


def to_json(report: StudyReport) -> str:
    """Return the text of `summary.json`; numbers that are not finite become null."""
    values = {
        "study": report.name,
        "status": COMPLETED if report.completed == len(report.all_runs) else "partial",
        "seconds": report.took.seconds if report.took else None,
        "runs_seconds": report.took.runs_s if report.took else None,
        "runs": {"planned": len(report.all_runs), COMPLETED: report.completed},
        "baseline": report.study.baseline.label,
        "seeds": list(report.study.seeds),
        "comparisons": [
            {"target": group.target, **asdict(c), "verdict": str(c.verdict), "sentence": sentence(c, group.metric)}
            for group in report.groups
            for c in group.comparisons
        ],
        "predictions": [{**asdict(p), "off": p.off, "holds": p.holds} for p in report.predictions],
        "not_predicted": [asdict(p) for p in report.unpredicted],
        "equal_time": [asdict(group) for group in report.times],
        "learning_rates": dict(report.study.choices.rates),
        "recommendations": [asdict(r) for r in report.recommended],
        "words": report.words,
        "environment": dict(report.environment),
    }
    return json.dumps(finite(values), indent=2, allow_nan=False) + "\n"
