"""The study's page, put together from charts, words and tables."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from echelon.core.units import format_seconds
from echelon.reporting.report import Chart, render_page
from echelon.reporting.report.tables import Headline, Table
from echelon.study.compare import ComparisonGroup, Verdict
from echelon.study.equal_time import time_words
from echelon.study.page.bars import cost_charts, target_charts
from echelon.study.page.curves import curve_charts
from echelon.study.page.fronts import front_charts
from echelon.study.page.scene import CandidateStyle, Scene, styles_of
from echelon.study.page.tables import failures, prediction_table, run_table, time_table, verdict_table
from echelon.study.predictions import unpredicted_words
from echelon.study.report import StudyReport
from echelon.study.settings import label_of
from echelon.study.stages import rate_words
from echelon.study.words import caveats, group_words, opening_words, whole_run_words


@dataclass(frozen=True)
class Section:
    """What the page shows of one set of terms."""

    place: int
    title: str
    equal: str
    words: list[str]
    verdicts: Table
    predictions: Table | None
    unpredicted: list[str]
    times: Table | None
    styles: list[CandidateStyle]
    learning: list[Chart]
    fronts: list[Chart]
    targets: list[Chart]
    costs: list[Chart]

    @property
    def charts(self) -> list[Chart]:
        """All of its charts."""
        return [*self.learning, *self.fronts, *self.targets, *self.costs]


def render_study(report: StudyReport, description: str, with_page: Collection[str] = ()) -> str:
    """Return the study's page as HTML.

    Args:
        description: the text of `study.yaml`.
        with_page: names of the runs whose page lies in the study's folder.
    """
    styles = styles_of(report.study)
    sections = [_section(report, i, group, styles) for i, group in enumerate(report.groups)]
    done = report.completed
    environment = Table("Environment", ["what", "value"], [[k, v] for k, v in report.environment.items()])
    return render_page(
        "study.html.j2",
        [chart for section in sections for chart in section.charts],
        title=report.name,
        status="completed" if done == len(report.all_runs) else f"{done} of {len(report.all_runs)} runs completed",
        whole=done == len(report.all_runs),
        headlines=_headlines(report, done),
        words=[
            *_opening(report),
            *time_words(report.study, report.times),
            *rate_words(report.study, report.apart),
            *caveats(report.study, report.runs),
        ],
        sections=sections,
        runs=run_table(report.all_runs, with_page),
        failures=failures(report.all_runs),
        environment=environment if environment.rows else None,
        commands=[r.command for r in report.all_runs if r.command],
        description=description,
    )


def _section(report: StudyReport, place: int, group: ComparisonGroup, styles: dict[str, CandidateStyle]) -> Section:
    runs = [r for r in report.runs if r.terms == group.terms]
    points = [p for p in report.points if p.terms == group.terms]
    shown = [styles[c.candidate] for c in group.comparisons]
    stray = frozenset(c.candidate for c in group.comparisons if c.verdict is Verdict.NOT_CONVERGED)
    scene = Scene(place, runs, points, shown, group.target, group.metric, stray)
    title = f"Under {group.terms}" if group.terms else "Compared"
    terms = next(t for t in report.study.terms if t.label == group.terms)
    equal = label_of({**report.study.base, **terms.settings}) if report.study.base or terms.settings else ""
    return Section(
        place=place,
        title=title,
        equal=equal,
        words=[*group_words(report.study, group), *whole_run_words(group, runs)],
        verdicts=verdict_table(group, scene),
        predictions=prediction_table([p for p in report.predictions if p.terms == group.terms]),
        unpredicted=unpredicted_words([p for p in report.unpredicted if p.terms == group.terms]),
        times=next((time_table(t, scene) for t in report.times if t.terms == group.terms), None),
        styles=shown,
        learning=curve_charts(scene),
        fronts=front_charts(scene),
        targets=target_charts(scene),
        costs=cost_charts(scene),
    )


def _opening(report: StudyReport) -> list[str]:
    outcome, *others = opening_words(report.study, report.recommended, report.runs)
    return [outcome, *([report.took.says] if report.took else []), *others]


def _headlines(report: StudyReport, done: int) -> list[Headline]:
    spent = sum(r.whole_s or 0.0 for r in report.all_runs)
    study = report.study
    headlines = [
        Headline(
            "runs",
            str(done),
            f"of {len(report.all_runs)} completed" if done < len(report.all_runs) else "all completed",
        ),
        Headline("candidates", str(len(study.candidates)), f"baseline {study.baseline.label}"),
        Headline("seeds", str(len(study.seeds))),
    ]
    if len(study.terms) > 1:
        headlines.append(Headline("sets of terms", str(len(study.terms))))
    if report.took is not None:
        aside = f"{format_seconds(report.took.runs_s)} of it in runs"
        headlines.append(Headline("time in all", format_seconds(report.took.seconds), aside))
    elif spent:
        headlines.append(Headline("time of all runs", format_seconds(spent)))
    return headlines
