"""Charts of cost: where a step's time goes, per rank and over the run, and what was sent."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from echelon.core.figure import Chart, Json, axis, color, line, pick, safe
from echelon.core.ticks import byte_axis, count_axis, time_axis
from echelon.core.units import format_bytes, format_seconds
from echelon.observe.phases import PHASES, Phase, phase_name, phase_share
from echelon.records.kinds import Steps
from echelon.reporting.report.records import RunRecord
from echelon.reporting.report.timing import Timing

_MOST_POINTS = 1500


def time_charts(record: RunRecord, timing: Timing | None) -> list[Chart]:
    """Time per phase: by rank, and over the run."""
    return [c for c in (_by_rank(record, timing), _over_steps(record.windows)) if c]


def traffic_charts(record: RunRecord) -> list[Chart]:
    """Bytes sent: over the run, and by group of parameters; what share of elements a sparse codec sent."""
    windows = record.kept_windows()
    has_servers = record.has_servers
    start = record.last_start
    inside = (
        f"; inside a replica ({', '.join(start.inner_axes)}) it is not counted" if start and start.inner_axes else ""
    )
    return [c for c in (_bytes(windows, has_servers, inside), _groups(windows, has_servers), _density(windows)) if c]


def phase_order(names: list[str]) -> list[str]:
    """Known phases in the order of a step, then any others as recorded."""
    known = [str(p) for p in PHASES if str(p) in names]
    return known + [n for n in names if n not in known]


def _token(phase: str) -> str:
    return phase if phase in list(Phase) else "other"


def _by_rank(record: RunRecord, timing: Timing | None) -> Chart | None:
    if timing is None or not timing.by_rank:
        return None
    ranks = range(len(timing.by_rank))
    labels = [f"rank {r}" + (f" · {safe(record.rank_host(r), 14)}" if record.rank_host(r) else "") for r in ranks]
    traces = []
    for phase in phase_order(list(timing.phases)):
        seconds = [rank.get(phase, 0.0) for rank in timing.by_rank]
        shares = [phase_share(s, timing.step_s) for s in seconds]
        traces.append(
            {
                "type": "bar",
                "orientation": "h",
                "name": safe(phase_name(phase)),
                "y": list(ranks),
                "x": seconds,
                "text": [f"{share:.0%}" if share >= 0.06 else "" for share in shares],
                "textposition": "inside",
                "textangle": 0,
                "insidetextanchor": "middle",
                "insidetextfont": {"color": color("paper"), "size": 12},
                "marker": {"color": color(_token(phase)), "line": {"color": color("paper"), "width": 1}},
                "hovertext": [format_seconds(s) for s in seconds],
                "hovertemplate": f"{safe(phase_name(phase))}: %{{hovertext}}<extra>%{{y}}</extra>",
            }
        )
    parts = ", ".join(f"{phase_name(p)} {timing.share(p):.0%}" for p in timing.phases)
    layout = {
        "barmode": "stack",
        "uniformtext": {"minsize": 10, "mode": "hide"},
        "xaxis": time_axis("mean time of a step", [timing.step_s]),
        "yaxis": {"tickvals": list(ranks), "ticktext": labels, "autorange": "reversed", "showgrid": False},
        "hovermode": "closest",
        "legend": {"traceorder": "normal"},
    }
    waits = "; a rank that waits for a slower one waits there" if record.waits_for_all else ""
    skipped = timing.skipped_windows
    warm_up = f" ({skipped} warm-up window{'s' * (skipped > 1)} left out)" if skipped else ""
    caption = (
        f"Mean over {timing.steps} steps{warm_up}; shares are of step time. "
        f"Communication is what is not hidden behind backward{waits}."
        + (
            " Each worker computes some of the steps: its time is told as a mean over all of them."
            if record.has_servers and not record.waits_for_all
            else ""
        )
    )
    height = min(900, 130 + 38 * len(labels))
    return Chart("phases", "Where a step goes", caption, f"Mean of the ranks: {parts}.", traces, layout, height, True)


def _over_steps(all_windows: Sequence[Steps]) -> Chart | None:
    windows = pick([w for w in all_windows if w.phases], 400)
    if len(windows) < 2:
        return None
    steps = [float(w.step) for w in windows]
    repeats = any(a >= b for a, b in pairwise(steps))
    places = [float(i) for i in range(len(windows))] if repeats else steps
    names = phase_order(list(dict.fromkeys(n for w in windows for n in w.phase_names)))
    traces = []
    for name in names:
        seconds = [_mean_phase(w, name) / w.count for w in windows]
        trace = line(phase_name(name), places, seconds, _token(name), width=0.5, stackgroup="one")
        trace["fillcolor"] = color(_token(name))
        trace["hovertext"] = [format_seconds(s) for s in seconds]
        trace["hovertemplate"] = "%{hovertext}"
        traces.append(trace)
    ticks = pick(list(range(len(windows))), 6)
    in_order = axis("step", tickvals=ticks, ticktext=[str(windows[i].step) for i in ticks])
    layout = {
        "xaxis": in_order if repeats else count_axis("step", steps[-1]),
        "yaxis": time_axis("time of a step", [w.seconds / w.count for w in windows]),
        "legend": {"traceorder": "normal"},
    }
    drawn_s = [sum(_mean_phase(w, name) for name in names) / w.count for w in windows]  # as high as the areas are
    slowest = max(range(len(windows)), key=drawn_s.__getitem__)
    said = f"The slowest window ends at step {windows[slowest].step}: {format_seconds(drawn_s[slowest])} per step."
    said += " In the order recorded, with steps that a restart repeated." if repeats else ""
    return Chart("steptime", "Step time over the run", said, said, traces, layout, 280, True)


def _mean_phase(window: Steps, name: str) -> float:
    if name not in window.phase_names:
        return 0.0
    column = window.phase_names.index(name)
    return sum(rank[column] for rank in window.phases) / len(window.phases)


def _bytes(windows: list[Steps], has_servers: bool, inside: str) -> Chart | None:
    if not any(w.wire_bytes for w in windows):
        return None
    total, points = 0.0, [(float(windows[0].step - windows[0].count), 0.0)]
    for w in windows:
        total += w.wire_bytes
        points.append((float(w.step), total))
    kept = pick(points, _MOST_POINTS)
    senders = "workers and servers" if has_servers else "all ranks together"
    said = f"{format_bytes(total)} sent by {senders} over {windows[-1].step} steps{inside}."
    layout = {"xaxis": count_axis("step", windows[-1].step), "yaxis": byte_axis("sent since the start", [total])}
    trace = line("bytes", [s for s, _ in kept], [b for _, b in kept], "communicate", fill="tozeroy")
    trace["fillcolor"] = color("wash")
    trace["hovertext"] = [format_bytes(b) for _, b in kept]
    trace["hovertemplate"] = "%{hovertext}<extra></extra>"
    return Chart("bytes", "Bytes sent", said, said, [trace], layout, 260)


def _density(windows: list[Steps]) -> Chart | None:
    points = [(float(w.step), w.density) for w in windows if w.density is not None]
    if not points:
        return None
    kept = pick(points, _MOST_POINTS)
    said = f"Rank 0's messages carried {points[-1][1]:.2%} of the encoded elements at the end."
    steps = count_axis("step", kept[-1][0])
    layout = {"xaxis": steps, "yaxis": axis("share of elements sent", tickformat=".2%", rangemode="tozero")}
    trace = line("density", [s for s, _ in kept], [d for _, d in kept], "communicate")
    return Chart("density", "Density of what is sent", said, said, [trace], layout, 260)


def _groups(windows: list[Steps], has_servers: bool) -> Chart | None:
    sums: dict[str, float] = {}
    for w in windows:
        for name, n_bytes in w.wire_bytes_by_group.items():
            sums[name] = sums.get(name, 0.0) + n_bytes
    if not sums:
        return None
    top = sorted(sums.items(), key=lambda item: -item[1])[:15]
    steps = sum(w.count for w in windows)
    trace: Json = {
        "type": "bar",
        "orientation": "h",
        "y": list(range(len(top))),
        "x": [b / steps for _, b in top],
        "text": [format_bytes(b / steps) for _, b in top],
        "textposition": "auto",
        "insidetextfont": {"color": color("paper")},
        "cliponaxis": False,
        "marker": {"color": color("communicate")},
        "hoverinfo": "skip",
    }
    ticks = {"tickvals": list(range(len(top))), "ticktext": [safe(n) for n, _ in top]}
    layout = {"xaxis": axis(visible=False), "yaxis": {**ticks, "autorange": "reversed", "showgrid": False}}
    said = "Most bytes: " + ", ".join(f"{safe(n)} {format_bytes(b / steps)} per step" for n, b in top[:3]) + "."
    title, caption = "Bytes by parameter group", "Per step, all ranks together."
    if has_servers:
        title = "Bytes pushed and pulled"
        caption = "Per step: gradients that workers push, parameters that servers send to those that pull them."
    return Chart("groups", title, caption, said, [trace], layout, max(200, 110 + 28 * len(top)))
