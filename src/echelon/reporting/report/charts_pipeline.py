"""The timeline of a pipeline: what each rank computed when, micro-batch by micro-batch, in one recorded step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from echelon.records.kinds import PipelineAction, PipelineStep
from echelon.reporting.report.figure import Chart, Json, axis, color, safe
from echelon.reporting.report.records import RunRecord

TOKENS = {"forward": "forward", "backward": "backward", "input": "backward", "weight": "update"}
WORDS = {
    "forward": "forward",
    "backward": "backward",
    "input": "backward, inputs' gradient",
    "weight": "backward, weights' gradient",
}
MOST_LABELS = 200


def pipeline_charts(record: RunRecord) -> list[Chart]:
    """Draw the last recorded step of a pipeline; nothing when none was recorded."""
    steps = timed_steps(record)
    return [_chart(steps[-1])] if steps else []


def timed_steps(record: RunRecord) -> list[PipelineStep]:
    """Return the recorded steps of a pipeline; computations of kinds that are unknown here are left out."""
    known = [replace(s, actions=[a for a in s.actions if a.kind in TOKENS]) for s in record.of(PipelineStep)]
    return [step for step in known if step.actions]


def idle_share(done: Sequence[PipelineAction]) -> float:
    """Return the share of the step in which ranks computed nothing, from the first computation to the last.

    >>> idle_share([PipelineAction(0, 0, 0, "forward", 0, 1), PipelineAction(1, 1, 0, "forward", 1, 2)])
    0.5
    """
    length = max(c.end_s for c in done) - min(c.begin_s for c in done)
    ranks = len({c.rank for c in done})
    return 1 - sum(c.end_s - c.begin_s for c in done) / (ranks * length) if length > 0 else 0.0


def _chart(step: PipelineStep) -> Chart:
    done = step.actions
    ranks = sorted({c.rank for c in done})
    schedule = safe(step.schedule)
    count = len({c.microbatch for c in done})
    stages = len({c.stage for c in done})
    traces = [_bars(kind, bars, done) for kind in TOKENS if (bars := [c for c in done if c.kind == kind])]
    words = (
        f"Step {step.step} of {schedule}: {count} micro-batches through {stages} stages on "
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


def _bars(kind: str, bars: list[PipelineAction], done: Sequence[PipelineAction]) -> Json:
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
