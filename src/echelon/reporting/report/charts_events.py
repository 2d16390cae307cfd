"""The timeline: attempts, evaluations, events and checkpoints over the run's own time."""

from __future__ import annotations

from echelon.core.units import format_bytes, format_seconds
from echelon.reporting.report.clock import Sitting, elapsed_s, sittings
from echelon.reporting.report.figure import Chart, Json, axis, color, safe
from echelon.reporting.report.records import RunRecord, TimelineEntry

_ROWS = ("checkpoint", "event", "evaluation", "attempt")


def timeline_chart(record: RunRecord) -> Chart | None:
    """What happened when; None when nothing did."""
    stretches = sittings(record)
    if not stretches or not any(s.end > s.begin for s in stretches):
        return None
    traces = [_attempt_bars(record, stretches)] if record.of_kind("start") else []
    saved = [m.t for m in record.of_kind("checkpoint")]
    points = [("checkpoint", "update", "square", saved, _checkpoint_words(record))]
    points.append(("evaluation", "eval", "diamond", [e.t for e in record.evaluations], _evaluation_words(record)))
    events = record.of_kind("event")
    points.append(("event", "communicate", "x", [m.t for m in events], [safe(m.message or m.name, 90) for m in events]))
    for name, token, symbol, times, said in points:
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": name,
                "x": [elapsed_s(stretches, t) for t in times],
                "y": [_ROWS.index(name)] * len(times),
                "text": said,
                "marker": {"color": color(token), "symbol": symbol, "size": 10},
                "hovertemplate": "%{x:.1f} s: %{text}<extra></extra>",
            }
        )
    ticks = {"tickvals": list(range(len(_ROWS))), "ticktext": [f"{r}s" for r in _ROWS], "range": [-0.6, 3.6]}
    layout = {
        "xaxis": axis("seconds since the command", rangemode="tozero"),
        "yaxis": {**ticks, "showgrid": False, "zeroline": False},
        "showlegend": False,
        "hovermode": "closest",
    }
    numbers = {"attempt": len(record.of_kind("start"))} | {name: len(times) for name, _, _, times, _ in points}
    count = ", ".join(f"{n} {name}{'s' * (n != 1)}" for name, n in numbers.items()) + "."
    return Chart("timeline", "What happened when", count, count, traces, layout, 250, True)


def _attempt_bars(record: RunRecord, stretches: list[Sitting]) -> Json:
    spans = attempt_spans(record)
    x0 = [elapsed_s(stretches, a) for a, _ in spans]
    x1 = [elapsed_s(stretches, b) for _, b in spans]
    return {
        "type": "bar",
        "orientation": "h",
        "base": x0,
        "x": [b - a for a, b in zip(x0, x1, strict=True)],
        "y": [_ROWS.index("attempt")] * len(spans),
        "width": 0.6,
        "text": [f"{format_seconds(b - a)}" for a, b in zip(x0, x1, strict=True)],
        "textposition": "inside",
        "insidetextanchor": "start",
        "insidetextfont": {"color": color("paper")},
        "marker": {"color": color("train")},
        "hoverinfo": "skip",
    }


def attempt_spans(record: RunRecord) -> list[tuple[float, float]]:
    """Unix times of each attempt's first step and of the last record before a death, an end or the next start."""
    spans: list[tuple[float, float]] = []
    begin: float | None = None
    for mark in record.marks:
        if mark.kind == "start":
            if begin is not None:
                spans.append((begin, mark.t))
            begin = mark.t
        elif begin is not None and _closes(mark):
            spans.append((begin, mark.t))
            begin = None
    if begin is not None and record.last_t is not None:
        spans.append((begin, record.last_t))
    return spans


def _closes(mark: TimelineEntry) -> bool:
    return mark.kind == "end" or (mark.kind == "event" and mark.name == "worker_died")


def _checkpoint_words(record: RunRecord) -> list[str]:
    return [
        f"step {m.number('step') or 0:.0f}, {format_bytes(m.number('n_bytes') or 0)}, training waited "
        f"{format_seconds(m.number('blocked_s') or 0)}"
        for m in record.of_kind("checkpoint")
    ]


def _evaluation_words(record: RunRecord) -> list[str]:
    return [f"epoch {e.epoch}, top-1 {e.metrics.get('top1', float('nan')):.4f}" for e in record.evaluations]
