"""Means over seeds of what the charts draw: curves by evaluation point, numbers by candidate."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from echelon.study.rows import COMPLETED, PointRow, RunRow


@dataclass(frozen=True)
class CurvePoint:
    """One evaluation point over the seeds: means of what was spent, mean accuracy and its least and greatest."""

    seconds: float
    wire_bytes: float
    samples: float
    top1: float
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
    """The mean curve of a candidate over the seeds that completed; points that only some seeds have are left out."""
    names = {r.run for r in runs if r.candidate == candidate and r.status == COMPLETED}
    by_place: dict[int, list[PointRow]] = {}
    for point in points:
        if point.run in names and point.top1 is not None:
            by_place.setdefault(point.point, []).append(point)
    return [_mean(rows) for _, rows in sorted(by_place.items()) if len(rows) == len(names)]


def _mean(rows: Sequence[PointRow]) -> CurvePoint:
    accuracy = [r.top1 for r in rows if r.top1 is not None]
    return CurvePoint(
        fmean(r.seconds for r in rows), fmean(r.wire_bytes for r in rows), fmean(r.samples for r in rows),
        fmean(accuracy), min(accuracy), max(accuracy), len(rows),
    )  # fmt: skip


def spread(runs: Sequence[RunRow], candidate: str, column: str) -> Spread | None:
    """A column's mean and range over a candidate's completed runs; None unless every one of them has a value."""
    values = [getattr(r, column) for r in runs if r.candidate == candidate and r.status == COMPLETED]
    if not values or any(v is None for v in values):
        return None
    return Spread(fmean(values), min(values), max(values))
