"""What charts of a run show: from windows whose truth is planted."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from echelon.core.figure import Chart, color
from echelon.core.task import Metric, TaskFacts
from echelon.records.events import Event, RankFailed
from echelon.records.kinds import Checkpoint, End, Evaluation, Pause, Start, Steps
from echelon.reporting import report
from echelon.reporting.report.charts_cost import time_charts
from echelon.reporting.report.charts_events import timeline_chart
from echelon.reporting.report.charts_learning import learning_charts
from echelon.reporting.report.charts_waterfall import waterfall_chart
from echelon.reporting.report.records import RunRecord
from echelon.reporting.report.tables import evaluation_table, events
from echelon.reporting.report.timing import measure
from echelon.reporting.report.waterfall import waterfall_of
from echelon.reporting.report.whole_run import whole_run_of

CSS = (Path(report.__file__).parent / "templates" / "page.css").read_text()


def window(step: int, count: int, **more: Any) -> Steps:
    fields = {"phase_names": ("forward",), "phases": ((0.1 * count,),), "samples": 10 * count, **more}
    return Steps(step, [1.0] * count, 0.1 * count, t=float(step), **fields)


def of(*windows: Steps) -> RunRecord:
    return RunRecord("run", [Start(t=0.0, launched_t=-5.0, world_size=1), *windows, End("completed", "", 60.0, t=55.0)])


def charts_of(record: RunRecord) -> dict[str, Chart]:
    return {chart.id: chart for chart in (*learning_charts(record), *time_charts(record, measure(record)))}


def test_epochs_are_counted_from_1_as_the_terminal_does() -> None:
    evaluations = [Evaluation(11 * (epoch + 1), epoch, 0.4, {"top1": 0.9}, 0.1, 100, t=11.5) for epoch in range(2)]
    record = RunRecord("run", [Start(t=0.0), window(11, 11), *evaluations, End("completed", t=12.0)])
    table, chart = evaluation_table(record), timeline_chart(record)
    assert table is not None and [row[0] for row in table.rows] == ["1", "2"]
    assert chart is not None and "epoch 1, " in str(chart.traces) and "epoch 0" not in str(chart.traces)


def test_a_learning_rate_is_told_with_its_steps() -> None:
    chart = charts_of(of(window(11, 11, lr=0.08), window(12, 1, lr=0.09), window(24, 12, lr=0.05)))["lr"]
    assert chart.caption.startswith("Learning rate from 0.08 at step 11 to 0.05 at step 24, at most 0.09.")
    assert "A point is where it was recorded" in chart.caption and chart.traces[0]["mode"] == "lines+markers"


def test_a_window_of_one_step_is_no_point_of_the_training_accuracy() -> None:
    """Its share of so few samples would be a fall."""
    windows = [window(11, 11, correct=22.0), window(12, 1, correct=0.0), window(24, 12, correct=60.0)]
    trace = charts_of(of(*windows))["accuracy"].traces[0]
    assert trace["x"] == [12.0, 24.0] and trace["y"] == pytest.approx([22 / 120, 0.5])
    windows = [window(11, 11, correct=22.0), window(12, 1, correct=0.0)]
    assert charts_of(of(*windows))["accuracy"].traces[0]["x"] == [12.0]


def test_steps_are_as_far_apart_as_they_are_unless_a_restart_repeated_some() -> None:
    chart = charts_of(of(window(11, 11), window(12, 1), window(24, 12)))["steptime"]
    assert chart.traces[0]["x"] == [11.0, 12.0, 24.0] and "tickvals" not in chart.layout["xaxis"]
    assert "restart" not in chart.caption
    chart = charts_of(of(window(11, 11), window(24, 12), window(12, 1)))["steptime"]
    assert chart.traces[0]["x"] == [0.0, 1.0, 2.0] and chart.layout["xaxis"]["ticktext"] == ["11", "24", "12"]
    assert "with steps that a restart repeated" in chart.caption


@pytest.mark.parametrize(
    ("windows", "said"), [(2, "Mean over 20 steps;"), (4, "30 steps (1 warm-up window left out);")]
)
def test_warm_up_is_told_where_it_was_left_out(windows: int, said: str) -> None:
    chart = charts_of(of(*(window(10 * n, 10) for n in range(1, windows + 1))))["phases"]
    assert said in chart.caption


def test_what_passes_before_the_first_step_is_a_part_of_the_wall_time() -> None:
    waterfall = waterfall_of(of(window(10, 10), window(11, 10)))
    assert waterfall is not None
    assert (waterfall.parts["start"], waterfall.parts["preparing"]) == ((5.0,), (9.0,))
    chart = waterfall_chart(waterfall)
    assert chart is not None
    shown = chart.layout["yaxis"]["ticktext"]
    assert shown[:3] == ["start of the run", "preparing the first step", "forward"]
    assert "closing (timings, report)" in shown


def test_the_last_checkpoint_is_written_before_the_run_closes() -> None:
    paused = {"pause_names": ("evaluation", "checkpoint"), "pauses": ((0.0, 0.25),)}
    windows = [window(10, 10), window(12, 10, **paused)]
    saved = [Pause("checkpoint", 0.5, 12, t=12.5), Checkpoint(12, t=14.0)]
    start, end = Start(t=9.0, launched_t=0.0, world_size=1), End("completed", "", 20.0, t=20.0)
    record = RunRecord("run", [start, *windows, *saved, end])
    waterfall, whole = waterfall_of(record), whole_run_of(record)
    assert waterfall is not None and whole is not None
    assert (whole.seconds, whole.pauses["checkpoint"]) == (5.0, 0.25 + 0.5 + 1.5)
    assert (waterfall.parts["checkpoint"], waterfall.parts["end"]) == ((2.25,), (6.0,))


def test_colours_of_phases_and_pauses_are_far_from_each_other() -> None:
    """The waterfall has both, below each other."""
    for theme in re.findall(r":root \{(.*?)\}", CSS, re.DOTALL):
        channels = {
            name: [int(found[i : i + 2], 16) for i in (0, 2, 4)]
            for name, found in re.findall(r"--(data|eval|communicate|update|forward): #([0-9a-f]{6})", theme)
        }
        for a, b in (("data", "eval"), ("data", "communicate"), ("data", "update"), ("data", "forward")):
            assert sum(abs(x - y) for x, y in zip(channels[a], channels[b], strict=True)) > 90, (a, b)


def test_a_note_does_not_look_like_a_failure() -> None:
    begun = [Start(t=0.0), window(10, 10), Event("said", name="settings", t=1.0)]
    record = RunRecord("run", [*begun, RankFailed("rank 1 failed", t=20.0), End("failed", "", 30.0, t=30.0)])
    chart = timeline_chart(record)
    assert chart is not None and "2 events" in chart.caption
    marked = {trace["x"][0]: trace["marker"] for trace in chart.traces if trace.get("name") == "event"}
    assert (marked[1.0]["symbol"], marked[20.0]["symbol"], marked[20.0]["color"]) == ("circle", "x", color("bad"))
    table = events(record)
    assert table is not None and [row[1] for row in table.rows] == [
        "training begins", "settings", "rank failed", "training ends",
    ]  # fmt: skip


def of_task(facts: TaskFacts, **metrics: float) -> RunRecord:
    held = [Evaluation(step, 0, 0.4, metrics, 0.1, 100, t=step + 0.5) for step in (11, 22)]
    begun = Start(t=0.0, launched_t=-5.0, world_size=1, task=facts)
    return RunRecord("run", [begun, window(11, 11), window(22, 11), *held, End("completed", "", 60.0, t=55.0)])


def test_where_the_loss_is_the_metric_its_evaluations_are_in_its_one_chart() -> None:
    record = of_task(TaskFacts("supervised", "supervised", "sample", Metric("loss", "min")), loss=0.4)
    charts = learning_charts(record)
    assert [chart.id for chart in charts].count("loss") == 1
    assert [trace["name"] for trace in charts_of(record)["loss"].traces] == ["training", "evaluation"]
    shown = TaskFacts(
        "t", "t", "sample", Metric("loss", "min"), score_label="top-1", curves=[Metric("perplexity", "min")]
    )
    charts = learning_charts(of_task(shown, loss=0.4, perplexity=1.5))
    assert [chart.id for chart in charts] == ["loss", "score"]
    assert [trace["name"] for trace in charts[1].traces] == ["evaluation perplexity"]


def test_a_second_metric_above_one_is_drawn_too_and_a_share_that_is_always_one_is_not() -> None:
    facts = TaskFacts(
        "t",
        "t",
        "token",
        Metric("chrf", "max"),
        curves=[Metric("perplexity", "min"), Metric("top5", "max", percent=True)],
    )
    charts = charts_of(of_task(facts, chrf=31.0, perplexity=7.5, top5=1.0))
    assert [trace["name"] for trace in charts["chrf"].traces] == ["evaluation chrf", "evaluation perplexity"]
