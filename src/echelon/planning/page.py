"""A plan as a page with pictures, and as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from echelon.core.figure import Chart, Json, axis, color, line, safe
from echelon.core.files import write_atomic
from echelon.core.json_values import JsonObject, finite_object
from echelon.core.ticks import time_axis
from echelon.core.units import format_seconds
from echelon.forecast.simulator import TaskSpan
from echelon.planning.pictures import front, priced, scaling
from echelon.planning.plan import PlannedMachines, PlanReport, RunEstimate, TargetEstimate
from echelon.planning.steps import Estimate
from echelon.planning.words import answer_words, choice_words, columns_of, opening, target_columns, target_title
from echelon.reporting.report import render_page
from echelon.reporting.report.tables import Headline, Table
from echelon.run.residuals import Residual, history_words

_COLORS = ("forward", "communicate", "backward", "update", "data")


@dataclass(frozen=True)
class PlanSection:
    """What the page shows of one description of machines."""

    title: str
    words: list[str]
    tables: list[Table]
    charts: list[Chart]


def write_page(plan: PlanReport, path: Path) -> None:
    """Write the page, whole or not at all."""
    sections = [_section(plan, answer, number) for number, answer in enumerate(plan.answers)]
    charts = [chart for section in sections for chart in section.charts]
    fronts, history = _front(plan), _history(plan.residuals)
    write_atomic(
        path,
        render_page(
            "plan.html.j2",
            [*charts, *fronts, *history],
            title="Plan",
            words=[*opening(plan), *choice_words(plan)],
            headlines=_headlines(plan),
            sections=sections,
            fronts=fronts,
            history=history,
            history_words=list(history_words(plan.residuals)) if history else [],
        ),
    )


def _section(plan: PlanReport, answer: PlannedMachines, number: int) -> PlanSection:
    charts = list(_charts(plan, answer, number))
    return PlanSection(answer.machines.name, answer_words(answer), _tables(plan, answer), charts)


def as_json(plan: PlanReport) -> JsonObject:
    """Return the plan as plain values; seconds, bytes."""
    return finite_object(
        {
            "source": plan.source,
            "steps": plan.length.steps,
            "batch": plan.length.batch,
            "words": choice_words(plan),
            "study": None if plan.samples is None else plan.samples.study,
            "target": None if plan.samples is None else plan.samples.target,
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
    memory = prediction.candidate.memory(prediction.division)
    return {
        "way": prediction.label,
        "settings": dict(prediction.candidate.settings),
        "exact": prediction.candidate.exact,
        "fits": prediction.fits,
        "step_s": step.value, "step_low_s": step.low, "step_high_s": step.high,
        "run_s": run.value, "run_low_s": run.low, "run_high_s": run.high,
        "cost": None if cost is None else cost.value,
        "parts": prediction.division.value or None,
        **_bounds("memory", "bytes", memory),
        "memory_unknown": prediction.candidate.unknown,
        "sent_bytes": prediction.step.sent_bytes,
        "to_target": None if prediction.to_target is None else _target_json(prediction.to_target),
        "bubble": prediction.step.bubble,
    }  # fmt: skip


def _target_json(target: TargetEstimate) -> JsonObject:
    cost = None if target.money is None else target.money.value
    bounds = {**_bounds("time", "s", target.seconds), **_bounds("samples", "epochs", target.epochs)}
    return finite_object({**bounds, "cost": cost, "reason": target.reason})


def _bounds(name: str, unit: str, estimate: Estimate | None) -> dict[str, float | None]:
    """Return a value and its bounds by name; None: not known."""
    value, low, high = (None,) * 3 if estimate is None else (estimate.value, estimate.low, estimate.high)
    return {f"{name}_{unit}": value, f"{name}_low_{unit}": low, f"{name}_high_{unit}": high}


def _headlines(plan: PlanReport) -> list[Headline]:
    found = []
    for answer in plan.answers[:4]:
        if answer.best:
            best = answer.best[0]
            aside = f"{best.label}; {format_seconds(best.run_s.low)} to {format_seconds(best.run_s.high)}"
            found.append(Headline(f"{answer.machines.workers} workers", format_seconds(best.run_s.value), aside))
    return found


def _tables(plan: PlanReport, answer: PlannedMachines) -> list[Table]:
    tables = [Table.of("Ways, the fastest first; * may cost accuracy", columns_of(answer.predictions))]
    if plan.samples is not None:
        tables.append(Table.of(target_title(plan.samples), target_columns(answer.predictions, plan.samples)))
    return tables


def _charts(plan: PlanReport, answer: PlannedMachines, number: int) -> Iterator[Chart]:
    shown = answer.best or list(answer.predictions[:1])
    yield _scaling(plan, answer, number)
    yield _timeline(shown[0], number)


def _scaling(plan: PlanReport, answer: PlannedMachines, number: int) -> Chart:
    """Draw samples a second over workers, of ways that can be asked for any number."""
    known = answer.known
    traces = [
        line(curve.label, curve.x, curve.y, _COLORS[place % len(_COLORS)], mode="lines+markers")
        for place, curve in enumerate(scaling(plan, answer))
    ]
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
    spans = prediction.step.shown
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


def _history(residuals: Sequence[Residual]) -> list[Chart]:
    """Draw predicted over measured of the runs in the same folder, in their order."""
    if not residuals:
        return []
    ratios = [residual.predicted_s / residual.measured_s for residual in residuals]
    trace = line("predicted / measured", list(range(1, len(ratios) + 1)), ratios, "forward", mode="lines+markers")
    return [
        Chart(
            id="history",
            title="Predicted over measured",
            caption="Seconds of a step, of each run in this folder that was predicted, the oldest first; at 1 the "
            "prediction was right.",
            label="Predicted over measured seconds of a step, run by run",
            traces=[{**trace, "text": [safe(f"{r.run}: {r.way}") for r in residuals]}],
            layout={
                "xaxis": axis("comparison"),
                "yaxis": axis("predicted / measured"),
                "margin": {"l": 8, "r": 8, "t": 8, "b": 8},
            },
            wide=True,
        )
    ]


def _front(plan: PlanReport) -> list[Chart]:
    """Draw money over time for all machines that have a price."""
    traces, seconds = [], []
    for place, answer in enumerate(plan.answers):
        known = priced(answer)
        x, y = [p.run_s.value for p in known], [p.money.value for p in known if p.money is not None]
        if x:
            seconds += x
            trace = line(answer.machines.name, x, y, _COLORS[place % len(_COLORS)])
            traces.append({**trace, "mode": "markers", "text": [safe(p.label) for p in known]})
    best = [(way.run_s.value, way.money.value) for _, way in front(plan) if way.money is not None]
    if not any(cost for _, cost in best):  # nothing has a price, or all is free
        return []
    traces.insert(0, line("none is faster and cheaper", [s for s, _ in best], [c for _, c in best], "data"))
    return [
        Chart(
            id="front",
            title="Cost over time",
            caption="Each point is a way on one description of machines; below and to the left is better. The line "
            "joins those that none is both faster and cheaper than.",
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
