"""The primary metric over seconds, bytes and samples: mean over the seeds, and a band from least to greatest."""

from __future__ import annotations

from echelon.core.figure import Chart, Json, axis, color, line
from echelon.core.ticks import byte_axis, count_axis, time_axis
from echelon.core.units import format_bytes, format_seconds, sentence_case
from echelon.study.metric import PrimaryMetric
from echelon.study.page.scene import LOG_FROM, CandidateStyle, CurvePoint, Scene, curve


def curve_charts(scene: Scene) -> list[Chart]:
    """Return the three charts of learning; those without a value are left out."""
    what = sentence_case(scene.metric.label)
    wanted = (
        ("seconds", f"{what} over time"),
        ("wire_bytes", f"{what} over traffic"),
        ("samples", f"{what} over samples"),
    )
    return [c for field, title in wanted if (c := _curves(scene, field, title))]


def _curves(scene: Scene, field: str, title: str) -> Chart | None:
    bands: list[Json] = []
    lines: list[Json] = []
    ends: list[tuple[float, CandidateStyle, CurvePoint]] = []
    reached: list[float] = []
    for style in scene.styles if field == "samples" else scene.sound:
        points = [p for p in curve(scene.points, scene.runs, style.label) if getattr(p, field) > 0]
        if not points:
            continue
        x = [getattr(p, field) for p in points]
        reached += x
        ends.append((x[-1], style, points[-1]))
        if points[0].seeds > 1:
            bands.append(_band(style, x, points))
        lines.append(_line(style, x, points, scene.metric))
    if not lines:
        return None
    last = [end for end, _, _ in ends]
    logarithmic = field != "samples" and max(last) > LOG_FROM * min(last)
    layout: Json = {
        "xaxis": _x_axis(field, reached, logarithmic),
        "yaxis": axis(scene.metric.label, **scene.metric.axis(0)),
        "hovermode": "closest",
        "showlegend": False,
    }
    if scene.target is not None:
        layout["shapes"] = [_target(scene.metric.text(scene.target), scene.target)]
    label = f"{title}. " + " ".join(
        f"{k.label} ends at {scene.metric.text(p.value)} after {_spent(field, p)}." for _, k, p in ends
    )
    caption = _caption(logarithmic, bool(bands), field) + ("" if field == "samples" else scene.left_out)
    return Chart(f"{field}-{scene.place}", title, caption, label, [*bands, *lines], layout, 360, field == "seconds")


def _x_axis(field: str, reached: list[float], log: bool) -> Json:
    if field == "seconds":
        return time_axis("time since the first step", reached, log)
    if field == "wire_bytes":
        return byte_axis("sent by all ranks", reached, log)
    return count_axis("samples trained on", max(reached), rangemode="tozero")


def _spent(field: str, point: CurvePoint) -> str:
    if field == "seconds":
        return format_seconds(point.seconds)
    return f"{format_bytes(point.wire_bytes)}" if field == "wire_bytes" else f"{point.samples:,.0f} samples"


def _line(style: CandidateStyle, x: list[float], points: list[CurvePoint], metric: PrimaryMetric) -> Json:
    texts = [
        f"{metric.text(p.value)} ({metric.text(p.low)} to {metric.text(p.high)})<br>"
        f"{format_seconds(p.seconds)} · {format_bytes(p.wire_bytes)} · {p.samples:,.0f} samples"
        for p in points
    ]
    values = [p.value for p in points]
    trace = line(style.label, x, values, style.token, mode="lines+markers", width=style.width, dash=style.dash)
    trace["name"] = style.name
    trace["marker"] = {"size": 5, "color": color(style.token)}
    trace["text"] = texts
    trace["hovertemplate"] = f"<b>{style.name}</b><br>%{{text}}<extra></extra>"
    return trace


def _band(style: CandidateStyle, x: list[float], points: list[CurvePoint]) -> Json:
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [*x, *reversed(x)],
        "y": [*(p.high for p in points), *(p.low for p in reversed(points))],
        "fill": "toself",
        "fillcolor": color(style.token),
        "line": {"width": 0},
        "opacity": 0.14,
        "hoverinfo": "skip",
    }


def _target(text: str, target: float) -> Json:
    return {
        "type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": target, "y1": target,
        "line": {"color": color("muted"), "width": 1, "dash": "dot"},
        "label": {
            "text": f"target {text}", "textposition": "start", "font": {"color": color("muted"), "size": 12},
        },
    }  # fmt: skip


def _caption(logarithmic: bool, bands: bool, field: str) -> str:
    sentences = ["Mean over the seeds; the band reaches from the worst to the best."] if bands else ["One seed."]
    if logarithmic:
        sentences.append("The axis is logarithmic.")
    if field == "seconds":
        sentences.append("Evaluations, checkpoints and other pauses count; what comes before the first step does not.")
    return " ".join(sentences)
