"""The timeline: attempts, evaluations, events and checkpoints over the run's own time."""

from __future__ import annotations

import math
from collections import Counter

from echelon.core.figure import Chart, Json, color, safe
from echelon.core.ticks import time_axis
from echelon.core.units import format_bytes, format_metric, format_seconds
from echelon.records.events import (
    CannotGoOn,
    DiskFails,
    Event,
    HangSeen,
    LossNotFinite,
    MachineLeft,
    RankFailed,
    Refusal,
    RoleFailed,
    RunDiverged,
    ServerGone,
    ServerLost,
    WorkerDied,
    WorkerGone,
)
from echelon.records.kinds import Checkpoint, End, Evaluation, Start
from echelon.reporting.report.clock import Sitting, elapsed_s, sittings
from echelon.reporting.report.records import RunRecord

_FAILURES = (
    WorkerDied, RankFailed, RoleFailed, HangSeen, Refusal, CannotGoOn, RunDiverged, LossNotFinite, MachineLeft,
    WorkerGone, ServerGone, ServerLost, DiskFails,
)  # fmt: skip
_ROWS = ("checkpoint", "event", "evaluation", "attempt")


def timeline_chart(record: RunRecord) -> Chart | None:
    """What happened when; None when nothing did."""
    stretches = sittings(record)
    if not stretches or not any(s.end > s.begin for s in stretches):
        return None
    traces = [_attempt_bars(record, stretches)] if record.of(Start) else []
    saved = [c.t for c in record.of(Checkpoint)]
    points = [("checkpoint", "update", "square", saved, [checkpoint_text(c) for c in record.of(Checkpoint)])]
    points.append(("evaluation", "eval", "diamond", [e.t for e in record.of(Evaluation)], _evaluation_words(record)))
    failed = [e for e in record.of(Event) if isinstance(e, _FAILURES)]
    notes = [e for e in record.of(Event) if not isinstance(e, _FAILURES)]
    for events, token, symbol in ((notes, "muted", "circle"), (failed, "bad", "x")):
        said = [safe(e.message or e.name, 90) for e in events]
        points.append(("event", token, symbol, [e.t for e in events], said))
    for name, token, symbol, times, said in points:
        traces.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": name,
                "x": [elapsed_s(stretches, t) for t in times],
                "y": [_ROWS.index(name)] * len(times),
                "marker": {"color": color(token), "symbol": symbol, "size": 10},
                "hovertext": [
                    f"{format_seconds(elapsed_s(stretches, t))}: {what}" for t, what in zip(times, said, strict=True)
                ],
                "hovertemplate": "%{hovertext}<extra></extra>",
            }
        )
    ticks = {"tickvals": list(range(len(_ROWS))), "ticktext": [f"{r}s" for r in _ROWS], "range": [-0.6, 3.6]}
    layout = {
        "xaxis": time_axis("time since the command", [elapsed_s(stretches, stretches[-1].end)]),
        "yaxis": {**ticks, "showgrid": False, "zeroline": False},
        "showlegend": False,
        "hovermode": "closest",
    }
    numbers = Counter({"attempt": len(record.of(Start))})
    for name, _, _, times, _ in points:
        numbers[name] += len(times)
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
        "textangle": 0,
        "insidetextanchor": "start",
        "insidetextfont": {"color": color("paper")},
        "marker": {"color": color("train")},
        "hoverinfo": "skip",
    }


def attempt_spans(record: RunRecord) -> list[tuple[float, float]]:
    """Unix times of each attempt's first step and of the last record before a death, an end or the next start."""
    spans: list[tuple[float, float]] = []
    begin: float | None = None
    for line in record.records:
        if isinstance(line, Start):
            if begin is not None:
                spans.append((begin, line.t))
            begin = line.t
        elif begin is not None and isinstance(line, End | WorkerDied):
            spans.append((begin, line.t))
            begin = None
    if begin is not None and record.last_t is not None:
        spans.append((begin, record.last_t))
    return spans


def checkpoint_text(saved: Checkpoint) -> str:
    """Say what a checkpoint cost; copying it is a part of the pause of training, the rest goes on beside training."""
    written = f"on the disk after {format_seconds(saved.total_s)}"
    times = f"copied in {format_seconds(saved.blocked_s)}, {written}" if saved.blocked_s < saved.total_s else written
    return f"step {saved.step}, {format_bytes(saved.n_bytes)}, {times}"


def _evaluation_words(record: RunRecord) -> list[str]:
    primary = record.task.primary
    values = [(e.epoch, e.metrics.get(primary.name)) for e in record.of(Evaluation)]
    return [f"epoch {epoch + 1}, {primary.title} {format_metric(math.nan if v is None else v)}" for epoch, v in values]
