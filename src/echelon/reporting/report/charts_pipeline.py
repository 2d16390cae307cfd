"""The recorded steps of a pipeline by micro-batch: a chart, and a trace file for chrome://tracing and Perfetto."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from echelon.core.errors import UserError
from echelon.core.figure import Chart, Json, color, safe
from echelon.core.files import write_atomic
from echelon.core.ticks import time_axis
from echelon.core.units import format_seconds
from echelon.records.kinds import PipelineAction, PipelineStep
from echelon.reporting.report.records import RunRecord, load_run

TOKENS = {"forward": "forward", "backward": "backward", "input": "backward", "weight": "update"}
WORDS = {
    "forward": "forward",
    "backward": "backward",
    "input": "backward, inputs' gradient",
    "weight": "backward, weights' gradient",
}
MOST_LABELS = 200
GAP_US = 1000.0  # between steps, which were not recorded one after the other


def pipeline_charts(record: RunRecord) -> list[Chart]:
    """Draw the last recorded step of a pipeline; nothing when none was recorded."""
    steps = timed_steps(record)
    return [_chart(steps[-1])] if steps else []


def timed_steps(record: RunRecord) -> list[PipelineStep]:
    """Return the recorded steps of a pipeline; computations of kinds that are unknown here are left out."""
    known = [replace(s, actions=[a for a in s.actions if a.kind in TOKENS]) for s in record.of(PipelineStep)]
    return [step for step in known if step.actions]


def _chart(step: PipelineStep) -> Chart:
    done = step.actions
    ranks = sorted({c.rank for c in done})
    schedule = safe(step.schedule)
    count = len({c.microbatch for c in done})
    stages = len({c.stage for c in done})
    traces = [_bars(kind, bars, done) for kind in TOKENS if (bars := [c for c in done if c.kind == kind])]
    words = (
        f"Step {step.step} of {schedule}: {count} micro-batches through {stages} stages on "
        f"{len(ranks)} ranks; the ranks computed nothing for {step.idle_share():.0%} of it."
    )
    layout = {
        "barmode": "overlay",
        "xaxis": time_axis("time since the step began", [c.end_s for c in done]),
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
        "base": [c.begin_s for c in bars],
        "x": [c.end_s - c.begin_s for c in bars],
        "y": [c.rank for c in bars],
        "width": 0.72,
        "text": [str(c.microbatch) if len(done) <= MOST_LABELS else "" for c in bars],
        "textposition": "inside",
        "insidetextanchor": "middle",
        "textangle": 0,
        "insidetextfont": {"color": color("paper")},
        "customdata": [[c.stage, c.microbatch, format_seconds(c.end_s - c.begin_s)] for c in bars],
        "hovertemplate": f"{WORDS[kind]}: stage %{{customdata[0]}}, micro-batch %{{customdata[1]}}, "
        "%{customdata[2]}<extra></extra>",
        "marker": {
            "color": color(TOKENS[kind]),
            "opacity": [1.0 if c.stage == min(d.stage for d in done if d.rank == c.rank) else 0.72 for c in bars],
            "line": {"color": color("paper"), "width": 2 if halves else 1},
        },
    }


def write_trace(run: Path, path: Path) -> int:
    """Write the recorded steps of a run's pipeline in the Trace Event Format, atomically; returns how many.

    Raises:
        UserError: the folder does not exist, or holds no recorded step of a pipeline.
    """
    record = load_run(run)
    steps = len(timed_steps(record))
    if not steps:
        raise UserError(f"{run} has no recorded step of a pipeline: a run with --parallel pp=N records some")
    write_atomic(path, json.dumps({"traceEvents": trace_events(record), "displayTimeUnit": "ms"}) + "\n")
    return steps


def trace_events(record: RunRecord) -> list[Json]:
    """Return the events of all recorded steps, one after the other: a thread per rank, times in microseconds."""
    events: list[Json] = []
    begin_us = 0.0
    ranks: set[int] = set()
    for step in timed_steps(record):
        ranks |= {action.rank for action in step.actions}
        for action in step.actions:
            events.append(
                {
                    "name": f"{WORDS[action.kind]} {action.microbatch}",
                    "cat": action.kind,
                    "ph": "X",
                    "ts": begin_us + 1e6 * action.begin_s,
                    "dur": 1e6 * (action.end_s - action.begin_s),
                    "pid": 0,
                    "tid": action.rank,
                    "args": {"step": step.step, "stage": action.stage, "microbatch": action.microbatch},
                }
            )
        begin_us += 1e6 * max(action.end_s for action in step.actions) + GAP_US
    names = [("thread_name", rank, f"pipeline rank {rank}") for rank in sorted(ranks)]
    return [{"name": n, "ph": "M", "pid": 0, "tid": tid, "args": {"name": what}} for n, tid, what in names] + events
