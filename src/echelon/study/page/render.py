"""Puts the study's page together from charts, words and tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from echelon.core.units import format_seconds
from echelon.reporting.report import Chart, render_page
from echelon.reporting.report.tables import Headline, Table
from echelon.study.compare import Group, Verdict
from echelon.study.page.bars import cost_charts, target_charts
from echelon.study.page.curves import Scene, curve_charts
from echelon.study.page.fronts import front_charts
from echelon.study.page.key import Key, keys_of
from echelon.study.page.tables import failures, prediction_table, run_table, verdict_table
from echelon.study.predictions import check_predictions
from echelon.study.rows import COMPLETED
from echelon.study.settings import label_of
from echelon.study.words import caveats, group_words, opening_words

if TYPE_CHECKING:
    from echelon.study.write import StudyReport


@dataclass(frozen=True)
class Section:
    """The part of the page on one set of terms."""

    place: int
    title: str
    equal: str
    words: list[str]
    verdicts: Table
    predictions: Table | None
    keys: list[Key]
    learning: list[Chart]
    fronts: list[Chart]
    targets: list[Chart]
    costs: list[Chart]

    @property
    def charts(self) -> list[Chart]:
        """All of its charts."""
        return [*self.learning, *self.fronts, *self.targets, *self.costs]


def render_study(report: StudyReport, description: str) -> str:
    """The study's page as HTML; `description` is the text of `study.yaml`."""
    keys = keys_of(report.study)
    sections = [_section(report, i, group, keys) for i, group in enumerate(report.groups)]
    done = sum(r.status == COMPLETED for r in report.runs)
    environment = Table("Environment", ["what", "value"], [[k, v] for k, v in report.environment.items()])
    return render_page(
        "study.html.j2",
        [chart for section in sections for chart in section.charts],
        title=report.name,
        status="completed" if done == len(report.runs) else f"{done} of {len(report.runs)} runs completed",
        whole=done == len(report.runs),
        headlines=_headlines(report, done),
        words=[*opening_words(report.study, report.recommended, report.runs), *caveats(report.study, report.runs)],
        sections=sections,
        runs=run_table(report.runs),
        failures=failures(report.runs),
        environment=environment if environment.rows else None,
        commands=[r.command for r in report.runs if r.command],
        description=description,
    )


def _section(report: StudyReport, place: int, group: Group, keys: dict[str, Key]) -> Section:
    runs = [r for r in report.runs if r.terms == group.terms]
    points = [p for p in report.points if p.terms == group.terms]
    mine = [keys[c.candidate] for c in group.comparisons]
    stray = frozenset(c.candidate for c in group.comparisons if c.verdict is Verdict.NOT_CONVERGED)
    scene = Scene(place, runs, points, mine, group.target, stray)
    title = f"Under {group.terms}" if group.terms else "Compared"
    terms = next(t for t in report.study.terms if t.label == group.terms)
    checked = check_predictions(report.study, report.runs)
    equal = label_of({**report.study.base, **terms.settings}) if report.study.base or terms.settings else ""
    return Section(
        place=place,
        title=title,
        equal=equal,
        words=group_words(report.study, group),
        verdicts=verdict_table(group, scene),
        predictions=prediction_table([c for c in checked if c.terms == group.terms]),
        keys=mine,
        learning=curve_charts(scene),
        fronts=front_charts(scene),
        targets=target_charts(scene),
        costs=cost_charts(scene),
    )


def _headlines(report: StudyReport, done: int) -> list[Headline]:
    spent = sum(r.whole_s or 0.0 for r in report.runs)
    study = report.study
    found = [
        Headline("runs", str(done), f"of {len(report.runs)} completed" if done < len(report.runs) else "all completed"),
        Headline("candidates", str(len(study.candidates)), f"baseline {study.baseline.label}"),
        Headline("seeds", str(len(study.seeds))),
    ]
    if len(study.terms) > 1:
        found.append(Headline("sets of terms", str(len(study.terms))))
    if spent:
        found.append(Headline("time of all runs", format_seconds(spent)))
    return found
