"""Accuracy over seconds, bytes and samples: mean over the seeds, and a band from the worst to the best of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from echelon.core.units import format_bytes, format_seconds
from echelon.reporting.report.figure import Chart, Json, axis, color, line, safe
from echelon.study.page.key import Key
from echelon.study.page.means import CurvePoint, curve
from echelon.study.rows import PointRow, RunRow

_LOG_FROM = 12.0
LABEL_LIMIT = 60


@dataclass(frozen=True)
class Scene:
    """What the charts of one set of terms are drawn from; `place` makes their ids unique on the page."""

    place: int
    runs: Sequence[RunRow]
    points: Sequence[PointRow]
    keys: Sequence[Key]
    target: float | None
    stray: frozenset[str] = frozenset()

    @property
    def sound(self) -> list[Key]:
        """Candidates that converged, or may have: one that did not would squeeze all others into a corner."""
        return [key for key in self.keys if key.label not in self.stray]

    @property
    def left_out(self) -> str:
        """Say which candidates a chart of the sound ones leaves out."""
        names = ", ".join(
            f"{key.number} {safe(key.label, LABEL_LIMIT)}" for key in self.keys if key.label in self.stray
        )
        return f" Not drawn, as it did not converge: {names}." if names else ""


def curve_charts(scene: Scene) -> list[Chart]:
    """The three charts of learning; those without a value are left out."""
    wanted = (
        ("seconds", "Accuracy over time", "seconds of training steps", 1.0),
        ("wire_bytes", "Accuracy over traffic", "MB sent by all ranks", 1e-6),
        ("samples", "Accuracy over samples", "samples trained on", 1.0),
    )
    return [c for field, title, unit, scale in wanted if (c := _curves(scene, field, title, (unit, scale)))]


def _curves(scene: Scene, field: str, title: str, unit: tuple[str, float]) -> Chart | None:
    bands: list[Json] = []
    lines: list[Json] = []
    ends: list[tuple[float, Key, CurvePoint]] = []
    for key in scene.keys if field == "samples" else scene.sound:
        found = [p for p in curve(scene.points, scene.runs, key.label) if getattr(p, field) > 0]
        if not found:
            continue
        x = [getattr(p, field) * unit[1] for p in found]
        ends.append((x[-1], key, found[-1]))
        if found[0].seeds > 1:
            bands.append(_band(key, x, found))
        lines.append(_line(key, x, found))
    if not lines:
        return None
    last = [end for end, _, _ in ends]
    logarithmic = field != "samples" and max(last) > _LOG_FROM * min(last)
    x_axis = axis(unit[0], **({"type": "log", "dtick": 1} if logarithmic else {"rangemode": "tozero"}))
    layout: Json = {
        "xaxis": x_axis,
        "yaxis": axis("test accuracy", tickformat=".0%"),
        "hovermode": "closest",
        "showlegend": False,
    }
    if scene.target is not None:
        layout["shapes"] = [_target(scene.target)]
    label = f"{title}. " + " ".join(f"{k.label} ends at {p.top1:.2%} after {_spent(field, p)}." for _, k, p in ends)
    caption = _caption(logarithmic, bool(bands), field) + ("" if field == "samples" else scene.left_out)
    return Chart(f"{field}-{scene.place}", title, caption, label, [*bands, *lines], layout, 360, field == "seconds")


def _spent(field: str, point: CurvePoint) -> str:
    if field == "seconds":
        return format_seconds(point.seconds)
    return f"{format_bytes(point.wire_bytes)}" if field == "wire_bytes" else f"{point.samples:,.0f} samples"


def _line(key: Key, x: list[float], found: list[CurvePoint]) -> Json:
    said = [
        f"{p.top1:.2%} ({p.low:.2%} to {p.high:.2%})<br>{format_seconds(p.seconds)} · {format_bytes(p.wire_bytes)}"
        f" · {p.samples:,.0f} samples"
        for p in found
    ]
    trace = line(key.label, x, [p.top1 for p in found], key.token, mode="lines+markers", width=key.width, dash=key.dash)
    trace["name"] = f"{key.number} {safe(key.label, LABEL_LIMIT)}"
    trace["marker"] = {"size": 5, "color": color(key.token)}
    trace["text"] = said
    trace["hovertemplate"] = f"<b>{key.number} {safe(key.label, LABEL_LIMIT)}</b><br>%{{text}}<extra></extra>"
    return trace


def _band(key: Key, x: list[float], found: list[CurvePoint]) -> Json:
    return {
        "type": "scatter",
        "mode": "lines",
        "x": [*x, *reversed(x)],
        "y": [*(p.high for p in found), *(p.low for p in reversed(found))],
        "fill": "toself",
        "fillcolor": color(key.token),
        "line": {"width": 0},
        "opacity": 0.14,
        "hoverinfo": "skip",
    }


def _target(target: float) -> Json:
    return {
        "type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": target, "y1": target,
        "line": {"color": color("muted"), "width": 1, "dash": "dot"},
        "label": {
            "text": f"target {target:.2%}", "textposition": "start", "font": {"color": color("muted"), "size": 12},
        },
    }  # fmt: skip


def _caption(logarithmic: bool, bands: bool, field: str) -> str:
    said = ["Mean over the seeds; the band reaches from the worst to the best."] if bands else ["One seed."]
    if logarithmic:
        said.append("The axis is logarithmic.")
    if field == "seconds":
        said.append("Start-up, evaluations and checkpoints are left out of the seconds.")
    return " ".join(said)
