"""Charts as plain plotly dictionaries. Colours are tokens (`@color:data`) that the page fills in for its theme."""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True)
class Chart:
    """One chart: `label` is what a screen reader says, `caption` what all read; `wide` spans the page.

    `choices` are what a reader chooses from (`choice` names it), and the traces that each shows.
    """

    id: str
    title: str
    caption: str
    label: str
    traces: list[Json]
    layout: Json = field(default_factory=dict)
    height: int = 300
    wide: bool = False
    choices: tuple[tuple[str, list[int]], ...] = ()
    choice: str = "Class"


def color(token: str) -> str:
    """Name a colour of the page: ink, muted, rule, paper, or a phase or series name."""
    return f"@color:{token}"


def safe(text: object, limit: int = 28) -> str:
    """Text from a record for use inside a chart, whose labels understand some HTML: escaped and shortened."""
    plain = str(text)
    return html.escape(plain if len(plain) <= limit else plain[: limit - 1] + "…", quote=False)


def axis(title: str = "", **more: Any) -> Json:
    """An axis with a title."""
    return {"title": {"text": title}, **more}


def line(name: str, x: Sequence[float], y: Sequence[float | None], token: str, **more: Any) -> Json:
    """A line through points."""
    return {
        "type": "scatter",
        "mode": more.pop("mode", "lines"),
        "name": safe(name),
        "x": list(x),
        "y": list(y),
        "line": {"color": color(token), "width": more.pop("width", 2), "dash": more.pop("dash", "solid")},
        **more,
    }


def dots(name: str, x: Sequence[float], y: Sequence[float | None], token: str, **more: Any) -> Json:
    """A thin line with a marker at each point, for values that exist only there."""
    marker = {"color": color(token), "size": 6, "symbol": more.pop("symbol", "circle")}
    return line(name, x, y, token, mode="lines+markers", marker=marker, **more)


def thin(x: Sequence[float], y: Sequence[float], limit: int) -> tuple[list[float], list[float]]:
    """At most `limit` points: means of equal runs of neighbours.

    >>> thin([1, 2, 3, 4], [0, 2, 4, 6], 2)
    ([2, 4], [1.0, 5.0])
    """
    if len(x) <= limit:
        return list(x), list(y)
    size = -(-len(x) // limit)
    groups = range(0, len(x), size)
    return (
        [x[min(i + size, len(x)) - 1] for i in groups],
        [sum(y[i : i + size]) / len(y[i : i + size]) for i in groups],
    )


def pick(items: Sequence[Any], limit: int) -> list[Any]:
    """At most `limit` items at equal distances, the first and the last among them.

    >>> pick([0, 1, 2, 3, 4], 3)
    [0, 2, 4]
    """
    if len(items) <= limit:
        return list(items)
    return [items[round(i * (len(items) - 1) / (limit - 1))] for i in range(limit)]
