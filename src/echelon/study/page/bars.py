"""Bars by candidate: seconds and bytes to the target, where a step goes, memory, density, staleness."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from echelon.core.figure import Chart, Json, axis, color, safe
from echelon.core.ticks import byte_axis, count_axis, time_axis
from echelon.core.units import format_bytes, format_seconds
from echelon.observe.phases import PHASES, phase_name
from echelon.study.base import COMPLETED
from echelon.study.page.scene import CandidateStyle, Scene, Spread, spread

_LABEL = 46


@dataclass(frozen=True)
class BarUnit:
    """How numbers of a column are written, and the axis of their bars."""

    write: Callable[[float], str]
    axis: Callable[..., Json]


def _share_axis(title: str, shares: Sequence[float], **more: Any) -> Json:
    return axis(title, tickformat="~%", **more)


SECONDS, BYTES = BarUnit(format_seconds, time_axis), BarUnit(format_bytes, byte_axis)
SHARE = BarUnit("{:.2%}".format, _share_axis)


def target_charts(scene: Scene) -> list[Chart]:
    """Return bars of seconds and bytes to the target; a candidate that missed it in a seed has no bar."""
    if scene.target is None:
        return []
    at = f"to {scene.metric.text(scene.target)}"
    return [
        _bars(scene, "target_s", f"Time {at}", SECONDS),
        _bars(scene, "target_bytes", f"Traffic {at}", BYTES),
    ]


def cost_charts(scene: Scene) -> list[Chart]:
    """Return charts of where a step goes, memory per rank, density and staleness, as far as they were recorded."""
    memory = _known_bars(scene, "memory_bytes", "Memory of the fullest rank", BYTES)
    return [c for c in (_phases(scene), memory, _density(scene), _staleness(scene)) if c]


def _known_bars(scene: Scene, column: str, title: str, unit: BarUnit) -> Chart | None:
    """Bars of the candidates that a column is known of; None where that is none."""
    known = [style for style in scene.styles if spread(scene.runs, style.label, column)]
    return _bars(replace(scene, styles=known), column, title, unit) if known else None


def _density(scene: Scene) -> Chart | None:
    chart = _known_bars(scene, "density", "Density of what is sent", SHARE)
    caption = "Of rank 0's messages, where a codec is sparse: mean over the steps and the seeds, with the seeds' range."
    return replace(chart, caption=caption) if chart else None


def _bars(scene: Scene, column: str, title: str, unit: BarUnit) -> Chart:
    drawn = [(style, spread(scene.runs, style.label, column)) for style in _measured(scene)]
    known = [(style, s) for style, s in drawn if s is not None]
    trace: Json = {
        "type": "bar",
        "orientation": "h",
        "y": list(range(len(drawn))),
        "x": [s.mean if s else 0 for _, s in drawn],
        "marker": {"color": [color(style.token) for style, _ in drawn]},
        "error_x": _errors([s for _, s in drawn]),
        "hovertemplate": [_hover(style, s, unit.write) for style, s in drawn],
    }
    longest = max((s.high for _, s in known), default=1.0)
    rows = _rows([style for style, _ in drawn])
    for i, (style, s) in enumerate(drawn):  # beside the range, which would cross a bar's own text
        text = unit.write(s.mean) if s else _missing(scene, style, column)
        rows["annotations"].append(_beside(i, s.high if s else 0.0, text))
    layout = {
        "xaxis": unit.axis("", [longest], range=[0, longest * 1.28]),
        **rows,
        "hovermode": "closest",
        "showlegend": False,
    }
    reached = "; ".join(f"{style.label} {unit.write(s.mean) if s else 'not reached'}" for style, s in drawn)
    caption = "Mean over the seeds, with their range."
    return Chart(
        f"{column}-{scene.place}", title, caption, f"{title}: {reached}.", [trace], layout, _height(len(drawn))
    )


def _beside(row: int, x: float, text: str) -> Json:
    return {
        "x": x, "y": row, "xanchor": "left", "xshift": 5, "showarrow": False, "text": text,
        "font": {"size": 12, "color": color("ink")},
    }  # fmt: skip


def _missing(scene: Scene, style: CandidateStyle, column: str) -> str:
    done = [r for r in scene.runs if r.candidate == style.label and r.status == COMPLETED]
    reached = sum(getattr(r, column) is not None for r in done)
    return f"reached in {reached} of {len(done)} seeds" if reached else "not reached"


def _errors(spreads: list[Spread | None]) -> Json:
    return {
        "type": "data", "symmetric": False, "array": [s.high - s.mean if s else 0 for s in spreads],
        "arrayminus": [s.mean - s.low if s else 0 for s in spreads],
        "color": color("muted"), "thickness": 1.2, "width": 4,
    }  # fmt: skip


def _hover(style: CandidateStyle, s: Spread | None, write: Callable[[float], str]) -> str:
    text = f"{write(s.mean)} ({write(s.low)} to {write(s.high)})" if s else "not reached in every seed"
    return f"<b>{style.name}</b><br>{text}<extra></extra>"


def _phases(scene: Scene) -> Chart | None:
    drawn = [style for style in _measured(scene) if spread(scene.runs, style.label, "step_s")]
    if not drawn:
        return None
    traces = []
    for phase in PHASES:
        spreads = [spread(scene.runs, style.label, f"phase_{phase}") for style in drawn]
        seconds = [s.mean if s else 0.0 for s in spreads]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": phase_name(phase),
                "y": list(range(len(drawn))),
                "x": seconds,
                "marker": {"color": color(str(phase)), "line": {"color": color("paper"), "width": 1}},
                "hovertext": [f"{phase_name(phase)}: {format_seconds(s)}" for s in seconds],
                "hovertemplate": "%{hovertext}<extra></extra>",
            }
        )
    clauses, longest = [], 0.0
    for style in drawn:
        step, waits = spread(scene.runs, style.label, "step_s"), spread(scene.runs, style.label, "phase_communicate")
        longest = max(longest, step.mean if step else 0.0)
        if step and waits and step.mean:
            clauses.append(
                f"{style.label} {format_seconds(step.mean)}, {waits.mean / step.mean:.0%} of it communication"
            )
    layout = {
        "barmode": "stack",
        "xaxis": time_axis("time of a step", [longest]),
        **_rows(drawn),
        "bargap": 0.74,  # on a phone the legend takes rows, and bars would reach their names
        "hovermode": "closest",
        "legend": {"traceorder": "normal"},
    }
    caption = (
        "Mean of seeds and ranks. Communication is what is not hidden behind backward, waiting for others included."
    )
    label = f"Where a step goes: {'; '.join(clauses)}."
    return Chart(
        f"phases-{scene.place}", "Where a step goes", caption, label, traces, layout, _height(len(drawn)) + 40, True
    )


def _staleness(scene: Scene) -> Chart | None:
    traces, clauses, most_behind = [], [], 0
    for style in scene.styles:
        shares = _histogram(scene, style.label)
        if not shares:
            continue
        most_behind = max(most_behind, *shares)
        mean = sum(k * share for k, share in shares.items())
        clauses.append(f"{style.label} {mean:.2f} on average")
        traces.append(
            {
                "type": "bar", "name": f"{style.number} {safe(style.label, 40)}",
                "x": list(shares), "y": list(shares.values()),
                "marker": {"color": color(style.token)}, "hovertemplate": "%{x} behind: %{y:.1%}<extra></extra>",
            }
        )  # fmt: skip
    if not traces:
        return None
    layout = {
        "xaxis": count_axis("updates behind", most_behind),
        "yaxis": axis("share of gradients", tickformat=".0%"),
        "hovermode": "closest",
        "showlegend": True,
    }
    words = f"How many updates the parameters behind a gradient were old: {'; '.join(clauses)}."
    return Chart(f"staleness-{scene.place}", "Staleness", words, words, traces, layout, 300)


def _histogram(scene: Scene, candidate: str) -> dict[int, float]:
    counts: dict[int, int] = {}
    for row in scene.runs:
        if row.candidate == candidate and row.status == COMPLETED and row.staleness:
            for pair in row.staleness.split():
                behind, _, n = pair.partition(":")
                counts[int(behind)] = counts.get(int(behind), 0) + int(n)
    total = sum(counts.values())
    return {k: n / total for k, n in sorted(counts.items())}


def _measured(scene: Scene) -> list[CandidateStyle]:
    done = {r.candidate for r in scene.runs if r.status == COMPLETED}
    return [style for style in scene.styles if style.label in done]


def _rows(styles: list[CandidateStyle]) -> Json:
    """Return one row for each candidate, its name above its bar: beside it there is no room on a phone."""
    names = [
        {
            "xref": "x domain", "x": 0, "xanchor": "left", "y": i, "yshift": 17, "showarrow": False,
            "text": f"<b>{style.number}</b> {safe(style.label, _LABEL)}", "font": {"size": 12, "color": color("ink")},
        }
        for i, style in enumerate(styles)
    ]  # fmt: skip
    axis_ = {"visible": False, "range": [len(styles) - 0.55, -0.75]}
    return {"annotations": names, "yaxis": axis_, "bargap": 0.62}


def _height(n: int) -> int:
    return 64 + 46 * n
