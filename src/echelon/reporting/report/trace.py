"""A pipeline's recorded steps as a trace file for chrome://tracing and Perfetto (ui.perfetto.dev)."""

from __future__ import annotations

import json
from pathlib import Path

from echelon.core.errors import UserError
from echelon.core.files import write_atomic
from echelon.reporting.report.charts_pipeline import WORDS, timed_steps
from echelon.reporting.report.figure import Json
from echelon.reporting.report.records import RunRecord, load_run

GAP_US = 1000.0  # between steps, which were not recorded one after the other


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
