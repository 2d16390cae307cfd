"""Data of the charts of a study's page: rows under one set of terms, styles of candidates, means over seeds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from echelon.core.figure import safe
from echelon.study.base import COMPLETED, Study
from echelon.study.metric import PrimaryMetric
from echelon.study.tables import PointRow, RunRow

COLOURS = 12
LABEL_LIMIT = 60
LOG_FROM = 12.0  # an axis is logarithmic where its greatest value is so many times its least
_DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
_STROKES = {"solid": "", "dash": "9 5", "dot": "2 4", "dashdot": "9 4 2 4", "longdash": "14 6"}


@dataclass(frozen=True)
class CandidateStyle:
    """The number, colour and dash of a candidate, the same in every chart of the page.

    `token` names a colour of the page; the baseline's is the text's own.
    """

    number: int
    label: str
    token: str
    dash: str

    @property
    def stroke(self) -> str:
        """The dash as SVG writes it."""
        return _STROKES[self.dash]

    @property
    def width(self) -> float:
        """The width of its lines in pixels."""
        return 3.0 if self.token == "ink" else 2.0

    @property
    def name(self) -> str:
        """Its number and label, escaped for a chart."""
        return f"{self.number} {safe(self.label, LABEL_LIMIT)}"


def styles_of(study: Study) -> dict[str, CandidateStyle]:
    """Return the style of each candidate by label. Neighbours differ in dash too, not in colour alone."""
    styles = {}
    for i, candidate in enumerate(study.candidates):
        token = "ink" if i == 0 else f"c{(i - 1) % COLOURS + 1}"
        dash = _DASHES[(i + i // COLOURS) % len(_DASHES)] if i else "solid"
        styles[candidate.label] = CandidateStyle(i + 1, candidate.label, token, dash)
    return styles


@dataclass(frozen=True)
class Scene:
    """Rows and styles of one set of terms.

    Attributes:
        place: number of the terms; makes the ids of charts unique on the page.
        stray: labels of candidates that did not converge.
    """

    place: int
    runs: Sequence[RunRow]
    points: Sequence[PointRow]
    styles: Sequence[CandidateStyle]
    target: float | None
    metric: PrimaryMetric
    stray: frozenset[str] = frozenset()

    @property
    def sound(self) -> list[CandidateStyle]:
        """Candidates that converged, or may have: the scale of one that did not would hide all others."""
        return [style for style in self.styles if style.label not in self.stray]

    @property
    def left_out(self) -> str:
        """A sentence on the candidates that a chart of the sound ones leaves out, or nothing."""
        names = ", ".join(style.name for style in self.styles if style.label in self.stray)
        return f" Not drawn, as it did not converge: {names}." if names else ""


@dataclass(frozen=True)
class CurvePoint:
    """One evaluation point over the seeds: means of what was spent, and mean, least and greatest of the metric."""

    seconds: float
    wire_bytes: float
    samples: float
    value: float
    low: float
    high: float
    seeds: int


@dataclass(frozen=True)
class Spread:
    """Mean, least and greatest over the seeds."""

    mean: float
    low: float
    high: float


def curve(points: Sequence[PointRow], runs: Sequence[RunRow], candidate: str) -> list[CurvePoint]:
    """Return a candidate's mean curve over the seeds that completed; points that only some seeds have are left out."""
    names = {r.run for r in runs if r.candidate == candidate and r.status == COMPLETED}
    by_place: dict[int, list[PointRow]] = {}
    for point in points:
        if point.run in names and point.value is not None:
            by_place.setdefault(point.point, []).append(point)
    return [_mean(rows) for _, rows in sorted(by_place.items()) if len(rows) == len(names)]


def _mean(rows: Sequence[PointRow]) -> CurvePoint:
    values = [r.value for r in rows if r.value is not None]
    return CurvePoint(
        fmean(r.seconds for r in rows), fmean(r.wire_bytes for r in rows), fmean(r.samples for r in rows),
        fmean(values), min(values), max(values), len(rows),
    )  # fmt: skip


def spread(runs: Sequence[RunRow], candidate: str, column: str) -> Spread | None:
    """Return a column's mean and range over a candidate's completed runs; None unless all of them have a value."""
    values = [getattr(r, column) for r in runs if r.candidate == candidate and r.status == COMPLETED]
    if not values or any(v is None for v in values):
        return None
    return Spread(fmean(values), min(values), max(values))
