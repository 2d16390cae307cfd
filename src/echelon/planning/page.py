"""A plan as a page with pictures, and as JSON."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from echelon.core.figure import Chart, Json, axis, color, line, safe
from echelon.core.files import write_atomic
from echelon.core.json_values import JsonObject, finite_object
from echelon.core.ticks import time_axis
from echelon.core.units import format_seconds
from echelon.forecast.simulator import TaskSpan
from echelon.planning.layouts import of_workers
from echelon.planning.plan import PlannedMachines, PlanReport, RunEstimate, predict
from echelon.planning.words import answer_words, choice_words, columns_of, opening
from echelon.reporting.report import render_page
from echelon.reporting.report.tables import Headline, Table

_COLORS = ("forward", "communicate", "backward", "update", "data")
_DRAWN = 5


@dataclass(frozen=True)
class PlanSection:
    """What the page shows of one description of machines."""

    title: str
    words: list[str]
    table: Table
    charts: list[Chart]


def write_page(plan: PlanReport, path: Path) -> None:
    """Write the page, whole or not at all."""
    sections = [
        PlanSection(answer.machines.name, answer_words(answer), _table(answer), list(_charts(plan, answer, number)))
        for number, answer in enumerate(plan.answers)
    ]
    charts = [chart for section in sections for chart in section.charts]
    fronts = _front(plan)
    write_atomic(
        path,
        render_page(
            "plan.html.j2",
            [*charts, *fronts],
            title="Plan",
            words=[*opening(plan), *choice_words(plan)],
            headlines=_headlines(plan),
            sections=sections,
            fronts=fronts,
        ),
    )


def as_json(plan: PlanReport) -> JsonObject:
    """Return the plan as plain values; seconds, bytes."""
    return finite_object(
        {
            "source": plan.source,
            "steps": plan.length.steps,
            "batch": plan.length.batch,
            "words": choice_words(plan),
            "machines": [
                {
                    "at": answer.machines.name,
                    "workers": answer.machines.workers,
                    "best": [p.label for p in answer.best],
                    "ways": [_json_of(p) for p in answer.predictions],
                    "words": answer_words(answer),
                }
                for answer in plan.answers
            ],
        }
    )


def _json_of(prediction: RunEstimate) -> JsonObject:
    step, run, cost = prediction.step.seconds, prediction.run_s, prediction.money
    return {
        "way": prediction.label,
        "settings": dict(prediction.candidate.settings),
        "exact": prediction.candidate.exact,
        "fits": prediction.fits,
        "step_s": step.value, "step_low_s": step.low, "step_high_s": step.high,
        "run_s": run.value, "run_low_s": run.low, "run_high_s": run.high,
        "cost": cost.value,
        "memory_bytes": prediction.candidate.memory_bytes,
        "memory_unknown": prediction.candidate.unknown,
        "sent_bytes": prediction.step.sent_bytes,
        "bubble": prediction.step.bubble,
    }  # fmt: skip


def _headlines(plan: PlanReport) -> list[Headline]:
    found = []
    for answer in plan.answers[:4]:
        if answer.best:
            best = answer.best[0]
            aside = f"{best.label}; {format_seconds(best.run_s.low)} to {format_seconds(best.run_s.high)}"
            found.append(Headline(f"{answer.machines.workers} workers", format_seconds(best.run_s.value), aside))
    return found


def _table(answer: PlannedMachines) -> Table:
    return Table.of("Ways, the fastest first; * may cost accuracy", columns_of(answer.predictions))


def _charts(plan: PlanReport, answer: PlannedMachines, number: int) -> Iterator[Chart]:
    shown = answer.best or list(answer.predictions[:1])
    yield _scaling(plan, answer, shown, number)
    yield _timeline(shown[0], number)


def _scaling(plan: PlanReport, answer: PlannedMachines, shown: Sequence[RunEstimate], number: int) -> Chart:
    """Draw steps a second over workers, of ways that can be asked for any number."""
    known, workers = answer.known, answer.machines.workers
    counts = sorted({max(2, round(workers * 2**e)) for e in range(-6, 2)} & set(range(2, plan.length.batch + 1)))
    traces = []
    movable = [p for p in answer.predictions if p.fits and p.candidate.way.for_any_workers]
    drawn = (movable or list(shown))[: _DRAWN - 1]
    drawn += [p for p in movable if p.candidate.exact and p not in drawn][:1]
    for place, prediction in enumerate(drawn):
        seconds = [
            predict(
                known,
                plan.length,
                replace(answer.machines, workers=count),
                of_workers(prediction.candidate, count),
            ).step.seconds.value
            for count in counts
        ]
        rates = [plan.length.batch / s for s in seconds]
        traces.append(line(prediction.label, counts, rates, _COLORS[place % len(_COLORS)], mode="lines+markers"))
    alone = known.batch / max(1e-9, sum(known.compute(known.batch / known.workers, 1.0).values()))
    return Chart(
        id=f"scaling-{number}",
        title="Samples a second over workers",
        caption="Predicted for a global batch that stays as it is: a rank's share becomes smaller. One process of the "
        f"calibration computes {alone / known.workers:,.0f} samples a second.",
        label="Samples a second over the number of workers, for the fastest ways",
        traces=traces,
        layout={
            "xaxis": axis("workers", type="log"),
            "yaxis": axis("samples/s", type="log"),
            "margin": {"l": 8, "r": 8, "t": 8, "b": 8},
        },
    )


def _timeline(prediction: RunEstimate, number: int) -> Chart:
    """Draw the simulated step: what each resource does when."""
    spans = [span for span in prediction.step.spans if span.end_s > span.begin_s]
    resources = list(dict.fromkeys(span.task.resource for span in spans))
    names = dict.fromkeys(span.task.name for span in spans)
    traces = [_bars(name, [span for span in spans if span.task.name == name]) for name in names]
    return Chart(
        id=f"timeline-{number}",
        title=f"A step of {prediction.label}",
        caption="Simulated: when the processor and the link of a rank work. Waiting for slower ranks comes on top.",
        label="What processor and link do during a step",
        traces=traces,
        layout={
            "xaxis": axis("ms"),
            "yaxis": axis("", categoryorder="array", categoryarray=resources[::-1]),
            "barmode": "overlay",
            "margin": {"l": 8, "r": 8, "t": 8, "b": 8},
        },
        height=160 + 28 * len(resources),
    )


def _bars(name: str, spans: Sequence[TaskSpan]) -> Json:
    """Draw when tasks of one name are worked on."""
    return {
        "type": "bar",
        "orientation": "h",
        "name": safe(name),
        "y": [span.task.resource for span in spans],
        "x": [(span.end_s - span.begin_s) * 1000 for span in spans],
        "base": [span.begin_s * 1000 for span in spans],
        "marker": {"color": color(str(name)), "line": {"width": 0.5, "color": color("paper")}},
    }


def _front(plan: PlanReport) -> list[Chart]:
    """Draw money over time for all machines that have a price."""
    traces, seconds = [], []
    for place, answer in enumerate(plan.answers):
        priced = [p for p in answer.predictions if p.fits and p.money.value and math.isfinite(p.run_s.value)]
        if priced:
            x = [p.run_s.value for p in priced]
            seconds += x
            trace = line(answer.machines.name, x, [p.money.value for p in priced], _COLORS[place % len(_COLORS)])
            traces.append({**trace, "mode": "markers", "text": [safe(p.label) for p in priced]})
    if not traces:
        return []
    return [
        Chart(
            id="front",
            title="Cost over time",
            caption="Each point is a way on one description of machines; below and to the left is better.",
            label="Cost of the run over its time",
            traces=traces,
            layout={
                "xaxis": time_axis("time of the run", seconds),
                "yaxis": axis("cost"),
                "hovermode": "closest",
                "margin": {"l": 8, "r": 8, "t": 8, "b": 8},
            },
            wide=True,
        )
    ]
