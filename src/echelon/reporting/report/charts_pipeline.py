"""The timeline of a pipeline: what each rank computed when, micro-batch by micro-batch, in one recorded step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from echelon.reporting.report.figure import Chart, Json, axis, color, safe
from echelon.reporting.report.records import RunRecord, TimelineEntry

TOKENS = {"forward": "forward", "backward": "backward", "input": "backward", "weight": "update"}
WORDS = {
    "forward": "forward",
    "backward": "backward",
    "input": "backward, inputs' gradient",
    "weight": "backward, weights' gradient",
}
MOST_LABELS = 200


@dataclass(frozen=True)
class Computation:
    """One bar: a stage's work on a micro-batch, in seconds since the step began."""

    rank: int
    stage: int
    microbatch: int
    kind: str
    begin_s: float
    end_s: float


def pipeline_charts(record: RunRecord) -> list[Chart]:
    """Draw the last recorded step of a pipeline; nothing when none was recorded."""
    marks = [mark for mark in record.of_kind("pipeline") if computations(mark)]
    return [_chart(marks[-1], computations(marks[-1]))] if marks else []


def computations(mark: TimelineEntry) -> list[Computation]:
    """Return the computations of a record of kind `pipeline`; rows that are not what they should be are left out.

    Its `actions` are rows of rank, stage, micro-batch, kind (`forward`, `backward`, or `input` and `weight` for the
    two halves of a backward), begin and end in seconds.
    """
    rows = mark.details.get("actions")
    return [found for row in rows if (found := _computation(row))] if isinstance(rows, list) else []


def idle_share(done: Sequence[Computation]) -> float:
    """Return the share of the step in which ranks computed nothing, from the first computation to the last.

    >>> idle_share([Computation(0, 0, 0, "forward", 0, 1), Computation(1, 1, 0, "forward", 1, 2)])
    0.5
    """
    length = max(c.end_s for c in done) - min(c.begin_s for c in done)
    ranks = len({c.rank for c in done})
    return 1 - sum(c.end_s - c.begin_s for c in done) / (ranks * length) if length > 0 else 0.0


def _computation(row: Any) -> Computation | None:
    if not isinstance(row, list) or len(row) != 6 or row[3] not in TOKENS:
        return None
    numbers = [value for i, value in enumerate(row) if i != 3]
    if any(isinstance(v, bool) or not isinstance(v, int | float) or not math.isfinite(v) for v in numbers):
        return None
    return Computation(int(row[0]), int(row[1]), int(row[2]), row[3], float(row[4]), float(row[5]))


def _chart(mark: TimelineEntry, done: list[Computation]) -> Chart:
    ranks = sorted({c.rank for c in done})
    schedule = safe(mark.details.get("schedule", "?"))
    count = len({c.microbatch for c in done})
    stages = len({c.stage for c in done})
    traces = [_bars(kind, bars, done) for kind in TOKENS if (bars := [c for c in done if c.kind == kind])]
    words = (
        f"Step {mark.number('step') or 0:.0f} of {schedule}: {count} micro-batches through {stages} stages on "
        f"{len(ranks)} ranks; the ranks computed nothing for {idle_share(done):.0%} of it."
    )
    layout = {
        "barmode": "overlay",
        "xaxis": axis("milliseconds since the step began"),
        "yaxis": {
            "tickvals": ranks,
            "ticktext": [f"stage rank {r}" for r in ranks],
            "autorange": "reversed",
            "showgrid": False,
        },
        "hovermode": "closest",
    }
    caption = f"{words} The number in a bar is its micro-batch; waiting and sending are the gaps."
    return Chart("pipeline", "The pipeline", caption, words, traces, layout, min(900, 140 + 46 * len(ranks)), True)


def _bars(kind: str, bars: list[Computation], done: list[Computation]) -> Json:
    halves = kind == "weight"
    return {
        "type": "bar",
        "orientation": "h",
        "name": WORDS[kind],
        "base": [1000 * c.begin_s for c in bars],
        "x": [1000 * (c.end_s - c.begin_s) for c in bars],
        "y": [c.rank for c in bars],
        "width": 0.72,
        "text": [str(c.microbatch) if len(done) <= MOST_LABELS else "" for c in bars],
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "insidetextfont": {"color": color("paper")},
        "customdata": [[c.stage, c.microbatch] for c in bars],
        "hovertemplate": f"{WORDS[kind]}: stage %{{customdata[0]}}, micro-batch %{{customdata[1]}}, %{{x:.3g}} ms"
        "<extra></extra>",
        "marker": {
            "color": color(TOKENS[kind]),
            "opacity": [1.0 if c.stage == min(d.stage for d in done if d.rank == c.rank) else 0.72 for c in bars],
            "line": {"color": color("paper"), "width": 2 if halves else 1},
        },
    }
