"""The primary metric against what it cost, and the front of candidates that no other beats in both."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from echelon.core.figure import Chart, Json, axis, color
from echelon.core.ticks import byte_axis, time_axis
from echelon.core.units import format_bytes, format_seconds, sentence_case
from echelon.study.metric import PrimaryMetric
from echelon.study.page.scene import LOG_FROM, CandidateStyle, Scene, Spread, spread

CostAndValue = tuple[CandidateStyle, Spread, Spread]


@dataclass(frozen=True)
class CostAxis:
    """What a candidate spends to the end: its column of the runs, how it is called, written, and drawn as an axis."""

    column: str
    noun: str
    label: str
    write: Callable[[float], str]
    axis: Callable[..., Json]


COSTS = (
    CostAxis("end_s", "time", "from the first step to the end", format_seconds, time_axis),
    CostAxis("wire_bytes", "traffic", "sent by all ranks", format_bytes, byte_axis),
)


def front_charts(scene: Scene) -> list[Chart]:
    """Return the charts of the final metric against seconds to the end, and against bytes."""
    charts = []
    for kind in COSTS:
        places = [
            (style, cost, value)
            for style in scene.sound
            if (cost := spread(scene.runs, style.label, kind.column))
            and (value := spread(scene.runs, style.label, "final"))
        ]
        if len(places) > 1:
            chart = _chart(f"front-{kind.column}-{scene.place}", kind, places, scene.metric)
            charts.append(replace(chart, caption=chart.caption + scene.left_out))
    return charts


def front(costs: Sequence[float], gains: Sequence[float]) -> list[int]:
    """Return the indices of the Pareto front, cheapest first: no other is at least as good in both, and better in one.

    >>> front([1, 2, 3], [0.5, 0.4, 0.9])
    [0, 2]
    """
    order = sorted(range(len(costs)), key=lambda i: (costs[i], -gains[i]))
    best: list[int] = []
    for i in order:
        if not best or gains[i] > gains[best[-1]]:
            best.append(i)
    return best


def _chart(id_: str, kind: CostAxis, places: list[CostAndValue], metric: PrimaryMetric) -> Chart:
    title = f"{sentence_case(metric.label)} against {kind.noun}"
    x = [cost.mean for _, cost, _ in places]
    y = [value.mean for _, _, value in places]
    best = front(x, [metric.score(v) for v in y])
    logarithmic = min(x) > 0 and max(x) > LOG_FROM * min(x)
    traces = [_front_line([x[i] for i in best], [y[i] for i in best])] if len(best) > 1 else []
    traces += [_marker(place, metric, kind, i in best) for i, place in enumerate(places)]
    names = ", ".join(places[i][0].label for i in best)
    layout = {
        "xaxis": kind.axis(kind.label, x, logarithmic),
        "yaxis": axis(f"final {metric.label}", **metric.axis(1)),
        "hovermode": "closest",
        "showlegend": False,
        "margin": {"l": 8, "r": 20, "t": 16, "b": 8},
    }
    caption = f"{'Up' if metric.direction == 'max' else 'Down'} and to the left is better. " + _shapes(
        len(places), len(best)
    )
    if any(value.low < value.high for _, _, value in places):
        caption += " The thin bars span the seeds."
    if logarithmic:
        caption += " The axis is logarithmic."
    return Chart(id_, title, caption, f"{title}. On the front, cheapest first: {names}.", traces, layout, 360)


def _shapes(n: int, on_front: int) -> str:
    """Say what circles, squares and the line between circles are, as far as they are drawn."""
    if on_front == 1:
        return "The circle beats or equals each of the others in both."
    circles = "Circles, which the line joins, are those that no other beats in both"
    return f"{circles}; squares are beaten." if on_front < n else f"{circles}."


def _front_line(x: list[float], y: list[float]) -> Json:
    return {
        "type": "scatter", "mode": "lines", "x": x, "y": y, "hoverinfo": "skip",
        "line": {"color": color("rule"), "width": 3, "shape": "hv"},
    }  # fmt: skip


def _marker(place: CostAndValue, metric: PrimaryMetric, kind: CostAxis, on_front: bool) -> Json:
    style, cost, value = place
    reached = f"{metric.text(value.mean)} ({metric.text(value.low)} to {metric.text(value.high)})"
    return {
        "type": "scatter",
        "mode": "markers+text",
        "name": style.name,
        "x": [cost.mean],
        "y": [value.mean],
        "text": [str(style.number)],
        "textfont": {"color": color("paper"), "size": 11},
        "error_y": {
            "type": "data", "symmetric": False, "array": [value.high - value.mean],
            "arrayminus": [value.mean - value.low], "color": color(style.token), "thickness": 1, "width": 3,
        },
        "marker": {
            "size": 20, "color": color(style.token), "symbol": "circle" if on_front else "square",
            "line": {"color": color("paper"), "width": 1},
        },
        "hovertemplate": f"<b>{style.name}</b><br>{reached}, {kind.write(cost.mean)}<extra></extra>",
    }  # fmt: skip
