"""Charts of a parameter server: staleness, workers' clocks and waiting, bytes by direction, servers' load."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import TypeVar

from echelon.core.columns import Column, bytes_column
from echelon.core.figure import Chart, Json, axis, color, dots, line, pick, safe
from echelon.core.ticks import byte_axis, count_axis, time_axis
from echelon.core.units import format_bytes, format_seconds, many
from echelon.records.kinds import ServerWindow, Start, WorkerWindow
from echelon.reporting.report.clock import elapsed_s, sittings
from echelon.reporting.report.records import RunRecord
from echelon.reporting.report.tables import Table

T = TypeVar("T")

_SERIES = ("forward", "communicate", "update", "data", "backward", "eval", "other", "ink")
_CAUSES = {"parameters": ("for parameters", "communicate"), "task": ("for work", "data")}
_MOST_LINES = 8
_MOST_POINTS = 400


@dataclass
class ServerTotals:
    """What one server did over all its lives."""

    lives: int = 0
    updates: int = 0
    duplicates: int = 0
    late: int = 0
    refused: int = 0
    busy_s: float = 0.0
    seconds: float = 0.0
    sent_bytes: int = 0
    received_bytes: int = 0
    staleness: Counter[int] = field(default_factory=Counter)
    dropped: Counter[str] = field(default_factory=Counter)

    @property
    def busy(self) -> float:
        """Share of its time that it worked."""
        return self.busy_s / self.seconds if self.seconds else 0.0

    def add(self, life: ServerWindow) -> None:
        """Add the last numbers of a life."""
        self.lives += 1
        self.updates += life.updates
        self.duplicates += life.duplicates
        self.late += life.late
        self.refused += life.refused
        self.busy_s += life.busy_s
        self.seconds += life.seconds
        self.sent_bytes += life.sent_bytes
        self.received_bytes += life.received_bytes
        self.staleness.update(staleness_counts(life))
        self.dropped.update(life.dropped)


def staleness_counts(window: ServerWindow) -> dict[int, int]:
    """Return how many gradients were so many updates old."""
    return {int(age): count for age, count in window.staleness.items() if age.isdigit()}


def server_charts(record: RunRecord) -> list[Chart]:
    """The charts of a run with a parameter server; none for others."""
    loads, workers = server_loads(record), record.of(WorkerWindow)
    charts = [_staleness(loads), _clocks(record), _waiting(workers), _bytes(loads, workers), _load(record)]
    return [chart for chart in charts if chart]


def server_loads(record: RunRecord) -> dict[str, ServerTotals]:
    """Sum each server's last numbers over its lives; a standby counts as itself."""
    last = {(window.name, str(window.life)): window for window in record.of(ServerWindow)}
    loads: dict[str, ServerTotals] = {}
    for (name, _), window in sorted(last.items()):
        loads.setdefault(name, ServerTotals()).add(window)
    return loads


def server_table(record: RunRecord) -> Table | None:
    """One row per server and standby."""
    loads = server_loads(record)
    if not loads:
        return None
    each = loads.values()
    columns = [
        Column("server", list(loads)),
        Column("lives", [str(load.lives) for load in each]),
        Column("updates of keys", [f"{load.updates:,}" for load in each]),
        Column("repeated pushes", [f"{load.duplicates:,}" for load in each]),
        Column("late pushes", [f"{load.late:,}" for load in each]),
        Column("busy", [f"{load.busy:.0%}" for load in each]),
        bytes_column("received", [load.received_bytes for load in each]),
        bytes_column("sent", [load.sent_bytes for load in each]),
        Column("peers refused", [f"{load.refused:,}" for load in each]),
        Column("messages dropped", [_dropped(load) for load in each]),
    ]
    return Table.of("Servers, over all their lives", columns)


def _dropped(load: ServerTotals) -> str:
    return ", ".join(f"{n} {reason}" for reason, n in sorted(load.dropped.items())) or "none"


def _staleness(loads: dict[str, ServerTotals]) -> Chart | None:
    counts: Counter[int] = sum((load.staleness for load in loads.values()), Counter())
    total = counts.total()
    if not total or set(counts) == {0}:
        return None
    ages = sorted(counts)
    mean = sum(age * n for age, n in counts.items()) / total
    at_least = next(a for a in ages if sum(counts[b] for b in ages if b <= a) >= 0.99 * total)
    trace: Json = {
        "type": "bar",
        "x": ages,
        "y": [counts[age] / total * 100 for age in ages],
        "marker": {"color": color("communicate")},
        "hovertemplate": "%{x} updates old: %{y:.1f}%<extra></extra>",
    }
    layout = {
        "xaxis": count_axis("age of a gradient in updates", ages[-1]),
        "yaxis": axis("% of the gradients", rangemode="tozero"),
        "bargap": 0.15,
    }
    most = f"99% of the gradients are at most {many(at_least, 'update')} old, " if at_least < ages[-1] else ""
    said = f"Mean staleness {mean:.1f}; {most}the oldest {many(ages[-1], 'update')}."
    return Chart("staleness", "Staleness of gradients", said, said, [trace], layout, 260)


def _clocks(record: RunRecord) -> Chart | None:
    trained_s, windows = _time_since_start(record), record.of(WorkerWindow)
    lines: dict[str, list[tuple[float, float]]] = {}
    for window in windows:
        for worker, clock in window.clocks.items():
            lines.setdefault(worker, []).append((trained_s(window.t), clock))
    if len(lines) < 2 or all(len(set(window.clocks.values())) < 2 for window in windows):
        return None  # where every step needs all, all have the same clock
    told = [w for w in windows if w.clocks]
    ahead = max(max(w.clocks.values()) - min(w.clocks.values()) for w in told)
    what = "Batches that each worker has finished"
    # as earlier runs recorded it; a batch of each worker may be finished whose step is in the next window
    if any(sum(w.clocks.values()) > w.step + len(w.clocks) for w in told):
        what = "How far each worker is, in batches; after a pause it goes on where the slowest other one is"
    said = f"{what}. Two workers were at most {ahead:.0f} batches apart, at {len(told)} counts."
    said += " A worker that evaluates finishes no batch meanwhile."
    most = max(clock for points in lines.values() for _, clock in points)
    layout = {"xaxis": _training_time(lines), "yaxis": count_axis("batches", most, rangemode="tozero")}
    return Chart("clocks", "Each worker's clock", said, said, _lines(lines), layout, 260)


def _waiting(windows: Sequence[WorkerWindow]) -> Chart | None:
    waited: dict[str, dict[str, float]] = {}
    for worker, history in _history([window.waited_s for window in windows]).items():
        waited[worker] = {cause: _grown(seconds.get(cause, 0.0) for seconds in history) for cause in _CAUSES}
    if not any(s for causes in waited.values() for s in causes.values()):
        return None
    names = sorted(waited, key=_by_number)
    traces = []
    for cause, (words, token) in _CAUSES.items():
        bars = _bars(words, names, [waited[w][cause] for w in names], token)
        texts = [format_seconds(waited[w][cause]) for w in names]
        traces.append({**bars, "hovertext": texts, "hovertemplate": "%{hovertext}<extra>%{y}</extra>"})
    totals = {words: sum(waited[w][cause] for w in names) for cause, (words, _) in _CAUSES.items()}
    said = "All workers together waited " + ", ".join(f"{format_seconds(s)} {w}" for w, s in totals.items()) + "."
    longest = max(sum(causes.values()) for causes in waited.values())
    layout = {**_row_layout(names, time_axis("", [longest])), "barmode": "stack"}
    return Chart("waiting", "Waiting, by cause", said, said, traces, layout, max(220, 120 + 30 * len(names)))


def _bytes(loads: dict[str, ServerTotals], windows: Sequence[WorkerWindow]) -> Chart | None:
    sent = {w: _grown(history) for w, history in _history([w.sent_bytes for w in windows]).items()}
    received = {w: _grown(history) for w, history in _history([w.received_bytes for w in windows]).items()}
    sent |= {name: load.sent_bytes for name, load in loads.items()}
    received |= {name: load.received_bytes for name, load in loads.items()}
    names = sorted({*sent, *received}, key=_by_number)
    if not any(sent.values()):
        return None
    traces = [
        _bars("sent", names, [sent.get(n, 0.0) for n in names], "communicate"),
        _bars("received", names, [received.get(n, 0.0) for n in names], "forward"),
    ]
    for trace in traces:
        trace["hovertext"] = [format_bytes(n_bytes) for n_bytes in trace["x"]]
        trace["hovertemplate"] = "%{hovertext}<extra>%{y}</extra>"
    up, down = (sum(d.get(n, 0.0) for n in names if n.startswith("worker")) for d in (sent, received))
    said = f"Workers sent {format_bytes(up)} and received {format_bytes(down)}, by each worker's last message."
    layout = {**_row_layout(names, byte_axis("", [*sent.values(), *received.values()])), "barmode": "group"}
    return Chart("directions", "Bytes by direction", said, said, traces, layout, max(240, 120 + 34 * len(names)))


def _load(record: RunRecord) -> Chart | None:
    trained_s = _time_since_start(record)
    lines: dict[str, list[tuple[float, float]]] = {}
    by_server: dict[str, list[ServerWindow]] = {}
    for window in record.of(ServerWindow):
        by_server.setdefault(window.name, []).append(window)
    for name, windows in by_server.items():
        for a, b in pairwise(windows):
            if a.life == b.life and b.seconds > a.seconds:
                busy = (b.busy_s - a.busy_s) / (b.seconds - a.seconds)
                lines.setdefault(name, []).append((trained_s(b.t), 100 * busy))
    if not any(len(points) > 1 for points in lines.values()):
        return None  # one number, which the table has
    means = ", ".join(f"{safe(n)} {sum(y for _, y in p) / len(p):.0f}%" for n, p in sorted(lines.items()))
    said = f"Share of its time in which a server decodes, updates and answers. Means: {means}."
    layout = {"xaxis": _training_time(lines), "yaxis": axis("% busy", rangemode="tozero")}
    return Chart("serverload", "Server load", said, said, _lines(lines), layout, 260)


def _time_since_start(record: RunRecord) -> Callable[[float], float]:
    """Return what makes of a unix time the run's own seconds since training began: before it is nothing to see."""
    stretches, start = sittings(record), next(iter(record.of(Start)), None)
    before_s = elapsed_s(stretches, start.t) if start is not None else 0.0
    return lambda t: elapsed_s(stretches, t) - before_s


def _training_time(lines: Mapping[str, Sequence[tuple[float, float]]]) -> Json:
    return time_axis("time since training began", [t for points in lines.values() for t, _ in points])


def _history(windows: Sequence[Mapping[str, T]]) -> dict[str, list[T]]:
    """What each worker told over time."""
    history: dict[str, list[T]] = {}
    for values in windows:
        for worker, value in values.items():
            history.setdefault(worker, []).append(value)
    return history


def _grown(values: Iterable[float]) -> float:
    """How much a counter grew that begins anew when its process does.

    >>> _grown([1, 5, 2, 3])
    8.0
    """
    total, before = 0.0, 0.0
    for value in values:
        total += value - before if value >= before else value
        before = value
    return float(total)


def _lines(points: dict[str, list[tuple[float, float]]]) -> list[Json]:
    traces = []
    for i, name in enumerate(sorted(points, key=_by_number)[:_MOST_LINES]):
        some = pick(points[name], _MOST_POINTS)
        draw = line if len(some) > 1 else dots  # a line of one point is not seen
        traces.append(draw(name, [x for x, _ in some], [y for _, y in some], _SERIES[i % len(_SERIES)]))
    return traces


def _bars(legend: str, names: Sequence[str], values: Sequence[float], token: str) -> Json:
    return {"type": "bar", "orientation": "h", "name": legend, "y": list(range(len(names))), "x": list(values),
            "marker": {"color": color(token)}}  # fmt: skip


def _row_layout(names: Sequence[str], x_axis: Json) -> Json:
    rows = {"tickvals": list(range(len(names))), "ticktext": [safe(n) for n in names]}
    return {"xaxis": x_axis, "yaxis": {**rows, "autorange": "reversed", "showgrid": False},
            "hovermode": "closest", "legend": {"traceorder": "normal"}}  # fmt: skip


def _by_number(name: str) -> tuple[str, int]:
    digits = name[len(name.rstrip("0123456789")) :]
    return name.removesuffix(digits), int(digits or 0)
