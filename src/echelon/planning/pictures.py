"""The pictures of a plan (scaling, time and money, a step) as numbers, for the page, and in characters, for a terminal.

In characters all is ASCII and at most 80 columns wide, so that a pipe or a log has the same.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from string import ascii_lowercase

from echelon.core.units import format_seconds
from echelon.forecast.simulator import TaskSpan
from echelon.planning.layouts import of_workers
from echelon.planning.pipelines import BETWEEN
from echelon.planning.plan import PlannedMachines, PlanReport, RunEstimate, predict
from echelon.planning.words import money
from echelon.run.residuals import Residual

MOST_CURVES = 5
_WIDTH, _HEIGHT, _MARGIN = 66, 12, 11
_LABEL = 66  # of a legend's entry
_MOST_POINTS = 12  # that a legend names
_PAUSE = "-"  # of a rank between two computations


@dataclass(frozen=True)
class PlottedCurve:
    """Points of one kind; `label` says which."""

    label: str
    x: Sequence[float]
    y: Sequence[float]


def scaling(plan: PlanReport, answer: PlannedMachines) -> list[PlottedCurve]:
    """Return samples a second over workers, of the fastest ways that can be asked for any number.

    Of workers of unlike speeds, others are taken to be as fast as these are on average.
    """
    machines = answer.machines
    counts = sorted({max(2, round(machines.workers * 2**e)) for e in range(-6, 2)})
    counts = [count for count in counts if count <= plan.length.batch]
    any_number = [p for p in answer.predictions if p.fits and p.candidate.way.for_any_workers]
    movable = [p for p in any_number if p.is_long_enough] or any_number
    drawn = (movable or answer.best or list(answer.predictions[:1]))[: MOST_CURVES - 1]
    drawn += [p for p in movable if p.candidate.exact and p not in drawn][:1]
    alike = replace(machines, groups=(), speed=machines.mean_speed) if machines.groups else machines
    curves = []
    for way in drawn:
        steps_s = [
            predict(answer.known, plan.length, replace(alike, workers=count), of_workers(way.candidate, count))
            .step.seconds.value
            for count in counts
        ]  # fmt: skip
        curves.append(PlottedCurve(way.label, counts, [plan.length.batch / s for s in steps_s]))
    return curves


def priced(answer: PlannedMachines) -> list[RunEstimate]:
    """Return the ways that fit and whose time and money are known."""
    return [p for p in answer.predictions if p.fits and p.money is not None and math.isfinite(p.run_s.value)]


def front(plan: PlanReport) -> list[tuple[str, RunEstimate]]:
    """Return the ways on all machines that none is both faster and cheaper than, the fastest first, with where.

    Ways that the run is too short for are left out.
    """
    every = [(answer.machines.name, way) for answer in plan.answers for way in priced(answer) if way.is_long_enough]
    every.sort(key=lambda each: (each[1].run_s.value, _cost(each[1])))
    best, found = math.inf, []
    for name, way in every:
        if _cost(way) < best:
            best = _cost(way)
            found.append((name, way))
    return found


def _cost(way: RunEstimate) -> float:
    return way.money.value if way.money is not None else math.inf


def scaling_lines(plan: PlanReport, answer: PlannedMachines) -> list[str]:
    """Draw samples a second over workers."""
    curves = scaling(plan, answer)
    return _drawn("Samples a second over workers", curves, _Axes(lambda v: f"{v:,.0f}", _count, joins=True))


def front_lines(plan: PlanReport) -> list[str]:
    """Draw the cost of ways over their time: those that none beats in both by letters, others as dots; none: no price.

    Where all is free there is nothing to draw.
    """
    best = front(plan)
    if not any(_cost(way) for _, way in best):
        return []
    several = len(plan.answers) > 1
    others = [p for answer in plan.answers for p in priced(answer) if all(p is not way for _, way in best)]
    rest = PlottedCurve("", [p.run_s.value for p in others], [_cost(p) for p in others])
    named = best[:_MOST_POINTS]
    curves = [
        PlottedCurve(
            f"{format_seconds(way.run_s.value)}, {money(way.money)}: {way.label}{f' on {name}' * several}",
            [way.run_s.value], [_cost(way)],
        )
        for name, way in named
    ]  # fmt: skip
    title = "Cost over time of the run; letters: none is both faster and cheaper"
    return _drawn(title, curves, _Axes(lambda v: f"{v:,.4g}", format_seconds), rest)


def history_lines(residuals: Sequence[Residual]) -> list[str]:
    """Draw predicted over measured, in the order in which runs were measured."""
    if len(residuals) < 2:
        return []
    ratios = [r.predicted_s / r.measured_s for r in residuals]
    places = [float(n + 1) for n in range(len(ratios))]
    axes = _Axes(lambda v: f"{v:.2f}x", _count, even=True)
    right = [places[0] + n * (places[-1] - places[0]) / _WIDTH for n in range(_WIDTH + 1)]
    title = "Predicted over measured seconds of a step, the oldest first; dots: 1.00x"
    return _drawn(
        title, [PlottedCurve("a comparison", places, ratios)], axes, PlottedCurve("", right, [1.0] * len(right))
    )


def timeline_lines(way: RunEstimate) -> list[str]:
    """Draw when processors and links work in the simulated step: a letter for what has most of a column's time."""
    spans = way.step.shown
    if not spans:
        return []
    end_s = max(span.end_s for span in spans)
    names = list(dict.fromkeys(str(span.task.name) for span in spans))
    letters = {name: _PAUSE if name == BETWEEN else name[:1].upper() for name in names}
    resources = list(dict.fromkeys(span.task.resource for span in spans))
    width = max(map(len, resources))
    columns = _WIDTH + _MARGIN - width - 1
    lines = [_cut(f"A step of {way.label}, simulated")]
    for resource in resources:
        row = _row([span for span in spans if span.task.resource == resource], end_s, columns, letters)
        lines.append(f"{resource:>{width}} {row}".rstrip())
    legend = "  ".join(f"{letter} {name}" for name, letter in letters.items())
    return [*lines, f"  {legend}  . nothing", f"  {format_seconds(end_s)}; waiting for others comes on top"]


def _row(spans: Sequence[TaskSpan], end_s: float, columns: int, letters: dict[str, str]) -> str:
    busy: list[dict[str, float]] = [defaultdict(float) for _ in range(columns)]
    each_s = end_s / columns
    for span in spans:
        first, last = int(span.begin_s / each_s), min(columns - 1, int(span.end_s / each_s))
        for place in range(min(first, last), last + 1):
            inside_s = min(span.end_s, (place + 1) * each_s) - max(span.begin_s, place * each_s)
            busy[place][letters[str(span.task.name)]] += max(0.0, inside_s)
    return "".join(_busiest(taken, each_s) for taken in busy)


def _busiest(taken: dict[str, float], column_s: float) -> str:
    if sum(taken.values()) < column_s / 2:
        return "."
    return max(taken, key=lambda letter: taken[letter])


@dataclass(frozen=True)
class _Axes:
    """How values are written at the axes, whether x is even (else logarithmic), and whether points are joined."""

    y_text: Callable[[float], str]
    x_text: Callable[[float], str]
    even: bool = False
    joins: bool = False


def _count(value: float) -> str:
    return f"{value:.0f}"


class _Scale:
    """Places of values along an axis of so many characters: in proportion to logarithms, or to values."""

    def __init__(self, values: Sequence[float], places: int, even: bool) -> None:
        self._of = (lambda v: v) if even else math.log
        least, most = min(values), max(values)
        if least == most:
            least, most = (least - 1, most + 1) if even else (least / 2, most * 2)
        self.least, self.most, self._places = least, most, places

    def place(self, value: float) -> int:
        """Return the place of a value."""
        low, high = self._of(self.least), self._of(self.most)
        return round((self._of(value) - low) / (high - low) * (self._places - 1))


def _drawn(title: str, curves: Sequence[PlottedCurve], axes: _Axes, others: PlottedCurve | None = None) -> list[str]:
    """Draw points by letters, curve by curve, with a legend; the first curve's letters lie on top."""
    every = [*curves, *([others] if others is not None else [])]
    points = [(x, y) for curve in every for x, y in zip(curve.x, curve.y, strict=True)]
    positive = [(x, y) for x, y in points if x > 0 and y > 0 and math.isfinite(x) and math.isfinite(y)]
    if not positive:
        return []
    xs, ys = _Scale([x for x, _ in positive], _WIDTH, axes.even), _Scale([y for _, y in positive], _HEIGHT, False)
    canvas = [[" "] * _WIDTH for _ in range(_HEIGHT)]

    def put(x: float, y: float, letter: str) -> None:
        """Draw a letter at a point; what cannot lie on such axes is left out."""
        if (x, y) in positive or axes.joins:
            canvas[_HEIGHT - 1 - ys.place(y)][xs.place(x)] = letter

    if others is not None:
        for x, y in zip(others.x, others.y, strict=True):
            put(x, y, ".")
    letters = list(zip(curves, ascii_lowercase, strict=False))
    if axes.joins:
        for curve, _ in letters:
            for x, y in _between(curve):
                put(x, y, ".")
    for curve, letter in reversed(letters):
        for x, y in zip(curve.x, curve.y, strict=True):
            put(x, y, letter)
    return [title, *_framed(canvas, xs, ys, axes), *(f"{'':>{_MARGIN}} {n} {_cut(c.label)}" for c, n in letters)]


def _between(curve: PlottedCurve) -> Iterator[tuple[float, float]]:
    """Yield points on the lines that join a curve's own, on logarithmic axes."""
    for place in range(len(curve.x) - 1):
        (x, y), (u, v) = ((curve.x[place + i], curve.y[place + i]) for i in (0, 1))
        steps = 12
        for step in range(1, steps):
            share = step / steps
            yield x ** (1 - share) * u**share, y ** (1 - share) * v**share


def _framed(canvas: Sequence[Sequence[str]], xs: _Scale, ys: _Scale, axes: _Axes) -> Iterator[str]:
    """Yield a canvas with its axes, whose ends are written."""
    marks = {0: axes.y_text(ys.most), len(canvas) - 1: axes.y_text(ys.least)}
    for place, row in enumerate(canvas):
        yield f"{marks.get(place, '')[:_MARGIN]:>{_MARGIN}} |{''.join(row)}".rstrip()
    yield f"{'':>{_MARGIN}} +{'-' * _WIDTH}"
    least, most = axes.x_text(xs.least), axes.x_text(xs.most)
    yield f"{'':>{_MARGIN}}  {least}{most:>{_WIDTH - len(least)}}"


def _cut(label: str) -> str:
    return label if len(label) <= _LABEL else f"{label[: _LABEL - 3]}..."
