"""Charts as plain plotly dictionaries, and sections of a report made of them.

Colours are tokens (`@color:data`) that the page fills in for its theme. All are plain JSON values: a task's sections
are kept in `evaluation.json`, so that a report needs none of its code.
"""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]


@dataclass(frozen=True)
class Choice:
    """What a reader of a chart may choose: its label, and the numbers of the traces that it shows."""

    label: str
    traces: Sequence[int]


@dataclass(frozen=True)
class Chart:
    """One chart of a page.

    Attributes:
        id: of the figure in the page; no other chart's.
        title: above it.
        caption: below it, for all readers.
        label: what a screen reader says.
        traces: plotly's.
        layout: plotly's.
        height: in pixels.
        wide: whether it spans the page.
        choices: what a reader chooses from.
        choice: names the choice.
    """

    id: str
    title: str
    caption: str
    label: str
    traces: Sequence[Mapping[str, Any]]
    layout: Mapping[str, Any] = field(default_factory=dict)
    height: int = 300
    wide: bool = False
    choices: Sequence[Choice] = ()
    choice: str = "Class"


@dataclass(frozen=True)
class ReportTable:
    """Rows of text below a head; the first column names the row, the others are numbers.

    Attributes:
        title: names it for all readers.
        summary: of a table that can be folded away, and is where it has many rows; empty: it cannot.
        meter: the column of shares in 0..1 that are drawn as bars; 0: none.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    summary: str = ""
    meter: int = 0


@dataclass(frozen=True)
class ReportPicture:
    """A small picture with lines of text below it, which also say what it is to who does not see it.

    Attributes:
        source: a `data:image/...` address; others are not shown, for a page fetches nothing.
        wide: whether it is several pictures side by side.
    """

    source: str
    lines: Sequence[str]
    wide: bool = False


@dataclass(frozen=True)
class ReportText:
    """A text as it stands, its lines kept.

    Attributes:
        title: above it; empty: none.
    """

    title: str
    text: str


@dataclass(frozen=True)
class ReportSection:
    """What a task shows of an evaluation in reports, beside its metrics."""

    title: str
    charts: Sequence[Chart] = ()
    tables: Sequence[ReportTable] = ()
    notes: Sequence[str] = ()
    pictures: Sequence[ReportPicture] = ()
    texts: Sequence[ReportText] = ()


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
