"""Write a run's report: `report.html` and `summary.json`, from nothing but its record."""

from __future__ import annotations

import json
from pathlib import Path

from echelon.core.files import write_atomic
from echelon.core.json_values import encodable
from echelon.records.summary import SUMMARY_FILE
from echelon.reporting.report.charts_cost import time_charts, traffic_charts
from echelon.reporting.report.charts_events import timeline_chart
from echelon.reporting.report.charts_learning import learning_charts
from echelon.reporting.report.charts_pipeline import pipeline_charts
from echelon.reporting.report.charts_server import server_charts, server_table
from echelon.reporting.report.charts_waterfall import waterfall_chart
from echelon.reporting.report.page import find_shared_script, render_page
from echelon.reporting.report.records import RunRecord, load_run
from echelon.reporting.report.summary import Summary, summarise
from echelon.reporting.report.tables import (
    command,
    communication_words,
    critical_table,
    critical_words,
    environment_table,
    evaluation_table,
    events,
    headlines,
    link_words,
    prediction_table,
    rank_table,
    slow_step_table,
    waterfall_table,
)
from echelon.reporting.report.timing import measure
from echelon.reporting.report.words import closing_words, evaluation_words

REPORT_FILE = "report.html"


def write_report(run: Path, alone: bool = False, known: RunRecord | None = None) -> Summary:
    """Write `report.html` and `summary.json` into a run's folder, each atomically, from its record.

    The page of a run of a study draws with the script in the study's folder, where there is one.

    A torn record, a run that failed before its first step and missing files are survived and said in the notes.

    Args:
        alone: write a page that needs no other file, also for a run of a study.
        known: what the folder holds, where that has been read.

    Raises:
        UserError: the folder does not exist.
    """
    record = known or load_run(run)
    summary = summarise(record)
    write_atomic(run / REPORT_FILE, encodable(render_run(record, summary, "" if alone else find_shared_script(run))))
    numbers = {**summary.to_json(), "words": closing_words(summary)}
    write_atomic(run / SUMMARY_FILE, json.dumps(numbers, indent=2, allow_nan=False) + "\n")
    return summary


def render_run(record: RunRecord, summary: Summary, shared_script: str = "") -> str:
    """The page of one run as HTML; see `render_page`."""
    timing = measure(record)
    timeline = timeline_chart(record)
    waterfall = waterfall_chart(summary.waterfall)
    sections = {
        "learning": learning_charts(record),
        "evaluation": [chart for section in record.evaluation.sections for chart in section.charts],
        "time": [*([waterfall] if waterfall else []), *time_charts(record, timing), *pipeline_charts(record)],
        "traffic": traffic_charts(record),
        "servers": server_charts(record),
        "events": [timeline] if timeline else [],
    }
    return render_page(
        "run.html.j2",
        [chart for charts in sections.values() for chart in charts],
        shared_script,
        title=record.name,
        summary=summary,
        words=closing_words(summary),
        headlines=headlines(summary),
        sections=sections,
        task_sections=record.evaluation.sections,
        task_note=evaluation_words(record.evaluation, record.kept_evaluations(), record.task),
        traffic_notes=link_words(record),
        ranks=rank_table(record, timing),
        waterfall=waterfall_table(record, summary),
        critical=critical_table(record, timing),
        predictions=prediction_table(summary),
        slow_steps=slow_step_table(summary),
        time_notes=[*communication_words(summary), *critical_words(timing)],
        servers=server_table(record),
        evaluations=evaluation_table(record),
        events=events(record),
        environment=environment_table(record),
        command=command(record),
        config=record.config_text,
    )
