"""Accuracy against what it cost, and the front of candidates that no other beats in both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from echelon.core.units import format_bytes, format_seconds
from echelon.reporting.report.figure import Chart, Json, axis, color, safe
from echelon.study.page.curves import LABEL_LIMIT, Scene
from echelon.study.page.key import Key
from echelon.study.page.means import Spread, spread

_LOG_FROM = 12.0
Place = tuple[Key, Spread, Spread]


def front_charts(scene: Scene) -> list[Chart]:
    """Final accuracy against seconds to the end, and against bytes."""
    charts = []
    wanted = (
        ("train_s", "Accuracy against time", "seconds to the end"),
        ("wire_bytes", "Accuracy against traffic", "MB sent"),
    )
    for column, title, unit in wanted:
        places = [
            (key, cost, accuracy)
            for key in scene.sound
            if (cost := spread(scene.runs, key.label, column)) and (accuracy := spread(scene.runs, key.label, "top1"))
        ]
        if len(places) > 1:
            chart = _chart(f"front-{column}-{scene.place}", title, unit, places)
            charts.append(replace(chart, caption=chart.caption + scene.left_out))
    return charts


def front(costs: Sequence[float], gains: Sequence[float]) -> list[int]:
    """Indices of the Pareto front, cheapest first: no other costs no more and gains no less, and one of both strictly.

    >>> front([1, 2, 3], [0.5, 0.4, 0.9])
    [0, 2]
    """
    order = sorted(range(len(costs)), key=lambda i: (costs[i], -gains[i]))
    found: list[int] = []
    for i in order:
        if not found or gains[i] > gains[found[-1]]:
            found.append(i)
    return found


def _chart(id_: str, title: str, unit: str, places: list[Place]) -> Chart:
    is_time = unit.startswith("seconds")
    scale = 1.0 if is_time else 1e-6
    x = [cost.mean * scale for _, cost, _ in places]
    y = [accuracy.mean for _, _, accuracy in places]
    best = front(x, y)
    logarithmic = min(x) > 0 and max(x) > _LOG_FROM * min(x)
    traces = [_front_line([x[i] for i in best], [y[i] for i in best])]
    traces += [_marker(place, x[i], is_time, i in best) for i, place in enumerate(places)]
    names = ", ".join(places[i][0].label for i in best)
    layout = {
        "xaxis": axis(unit, **({"type": "log", "dtick": 1} if logarithmic else {"rangemode": "tozero"})),
        "yaxis": axis("final accuracy", tickformat=".1%"),
        "hovermode": "closest",
        "showlegend": False,
        "margin": {"l": 8, "r": 20, "t": 16, "b": 8},
    }
    caption = (
        "Up and to the left is better. The line joins those that no other beats in both; the bars span the seeds."
        + (" The axis is logarithmic." if logarithmic else "")
    )
    return Chart(id_, title, caption, f"{title}. On the front, cheapest first: {names}.", traces, layout, 360)


def _front_line(x: list[float], y: list[float]) -> Json:
    return {
        "type": "scatter", "mode": "lines", "x": x, "y": y, "hoverinfo": "skip",
        "line": {"color": color("rule"), "width": 3, "shape": "hv"},
    }  # fmt: skip


def _marker(place: Place, x: float, is_time: bool, on_front: bool) -> Json:
    key, cost, accuracy = place
    said = format_seconds(cost.mean) if is_time else format_bytes(cost.mean)
    name = f"{key.number} {safe(key.label, LABEL_LIMIT)}"
    reached = f"{accuracy.mean:.2%} ({accuracy.low:.2%} to {accuracy.high:.2%})"
    return {
        "type": "scatter",
        "mode": "markers+text",
        "name": name,
        "x": [x],
        "y": [accuracy.mean],
        "text": [str(key.number)],
        "textfont": {"color": color("paper"), "size": 11},
        "error_y": {
            "type": "data", "symmetric": False, "array": [accuracy.high - accuracy.mean],
            "arrayminus": [accuracy.mean - accuracy.low], "color": color(key.token), "thickness": 1, "width": 3,
        },
        "marker": {
            "size": 20, "color": color(key.token), "symbol": "circle" if on_front else "square",
            "line": {"color": color("paper"), "width": 1},
        },
        "hovertemplate": f"<b>{name}</b><br>{reached}, {said}<extra></extra>",
    }  # fmt: skip
