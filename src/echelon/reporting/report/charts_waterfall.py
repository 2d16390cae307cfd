"""The waterfall of a run's wall time, a rank at a time."""

from __future__ import annotations

from echelon.core.figure import Chart, Choice, Json, axis, color, safe
from echelon.core.units import format_seconds
from echelon.observe.phases import Phase
from echelon.reporting.report.waterfall import END, MISSING, RESTART, START, Waterfall

WAITING = "waiting for servers"
_SAID = {
    "data": "input", "communicate": "communication", "other": "other (in no phase)", START: "start of the run",
    RESTART: "restarts", END: "end (report, last files)",
}  # fmt: skip
_MOST_RANKS = 64


def part_name(name: str, served: bool = False) -> str:
    """Say a part in words; where servers hold the parameters, what is waited for is they."""
    return WAITING if served and name == Phase.COMMUNICATE else _SAID.get(name, name)


def waterfall_chart(waterfall: Waterfall | None, served: bool = False) -> Chart | None:
    """One bar per part, each beginning where the one before ends; the rank is chosen."""
    if waterfall is None:
        return None
    shown = {name: s for name, s in waterfall.parts.items() if name != MISSING or waterfall.missing > 0.001}
    labels = [safe(part_name(name, served)) for name in shown]
    ranks = range(min(waterfall.ranks, _MOST_RANKS))
    traces = [_trace(waterfall, shown, rank) for rank in ranks]
    places = list(range(len(shown) + 1))
    layout = {
        "xaxis": axis("seconds since the command", range=[0, waterfall.wall_s * 1.25]),  # room for the last labels
        "yaxis": {"tickvals": places, "ticktext": [*labels, "wall time"], "autorange": "reversed", "showgrid": False},
        "hovermode": "closest",
        "showlegend": False,
        "barmode": "overlay",
    }
    caption = (
        "Each part begins where the one before it ends; parts of all steps are added up. Pauses between steps "
        "(evaluation, checkpoint, recording) belong to no phase. Shares here are of the wall time, elsewhere of step "
        "time. "
        f"Together they are the wall time within {waterfall.missing:.1%}."
    )
    largest = sorted(shown.items(), key=lambda item: -item[1][0])[:4]
    said = ", ".join(f"{part_name(n, served)} {format_seconds(s[0])}" for n, s in largest)
    label = f"Of {format_seconds(waterfall.wall_s)} on rank 0: {said}."
    choices = tuple(Choice(f"rank {r}", [r]) for r in ranks) if waterfall.ranks > 1 else ()
    height = 110 + 26 * len(places)
    return Chart("waterfall", "Where the wall time went", caption, label, traces, layout, height, True, choices, "Rank")


def _trace(waterfall: Waterfall, shown: dict[str, tuple[float, ...]], rank: int) -> Json:
    bases, widths, reached = [], [], 0.0
    for seconds in shown.values():
        bases.append(reached)
        widths.append(seconds[rank])
        reached += seconds[rank]
    widths.append(waterfall.wall_s)
    return {
        "type": "bar",
        "orientation": "h",
        "name": f"rank {rank}",
        "visible": rank == 0,
        "y": list(range(len(widths))),
        "x": widths,
        "base": [*bases, 0.0],
        "text": [f"{format_seconds(s)} · {s / waterfall.wall_s:.0%} of wall time" if s else "" for s in widths],
        "textposition": "outside",
        "cliponaxis": False,
        "marker": {"color": [color(_token(name)) for name in [*shown, "wall"]]},
        "hoverinfo": "skip",
    }


def _token(name: str) -> str:
    if name in list(Phase):
        return name
    return {"wall": "ink", "evaluation": "eval", "checkpoint": "wait", MISSING: "bad"}.get(name, "faint")
