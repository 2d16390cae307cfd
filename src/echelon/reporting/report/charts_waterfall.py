"""The waterfall of a run's wall time, a rank at a time."""

from __future__ import annotations

from itertools import accumulate, pairwise

from echelon.core.figure import Chart, Choice, Json, color, safe
from echelon.core.ticks import time_axis
from echelon.core.units import format_seconds
from echelon.observe.phases import Phase, phase_name
from echelon.reporting.report.waterfall import END, MISSING, PREPARING, RESTART, START, Waterfall

_SAID = {
    "other": "other (in no phase)", START: "start of the run",
    RESTART: "restarts", PREPARING: "preparing the first step", END: "closing (timings, report)",
}  # fmt: skip
_MOST_RANKS = 64
_WIDE = 0.5  # a bar of this share of the wall time has room for its text inside, also on a phone


def part_name(name: str) -> str:
    """Say a part in words: a phase has the same ones on each page and in the terminal."""
    return _SAID.get(name, phase_name(name))


def waterfall_chart(waterfall: Waterfall | None) -> Chart | None:
    """One bar per part, each beginning where the one before ends; the rank is chosen."""
    if waterfall is None:
        return None
    shown = {name: s for name, s in waterfall.parts.items() if name != MISSING or waterfall.missing > 0.001}
    labels = [safe(part_name(name)) for name in shown]
    ranks = range(min(waterfall.ranks, _MOST_RANKS))
    traces = [made(waterfall, shown, rank) for rank in ranks for made in (_bars, _texts)]
    places = list(range(len(shown) + 1))
    layout = {
        "xaxis": time_axis("time since the command", [waterfall.wall_s], range=[0, waterfall.wall_s * 1.02]),
        "yaxis": {"tickvals": places, "ticktext": [*labels, "wall time"], "autorange": "reversed", "showgrid": False},
        "hovermode": "closest",
        "showlegend": False,
        "barmode": "overlay",
    }
    caption = (
        "Each part begins where the one before it ends; parts of all steps are added up. Pauses between steps "
        "(evaluation, checkpoint, recording, callbacks) belong to no phase. Shares here are of the wall time, "
        "elsewhere of step time. "
        f"Their sum differs from the wall time by {max(0.001, waterfall.missing):.1%} at most."
    )
    largest = sorted(shown.items(), key=lambda item: -item[1][0])[:4]
    said = ", ".join(f"{part_name(n)} {format_seconds(s[0])}" for n, s in largest)
    label = f"Of {format_seconds(waterfall.wall_s)} on rank 0: {said}."
    choices = tuple(Choice(f"rank {r}", [2 * r, 2 * r + 1]) for r in ranks) if waterfall.ranks > 1 else ()
    height = 110 + 26 * len(places)
    return Chart("waterfall", "Where the wall time went", caption, label, traces, layout, height, True, choices, "Rank")


def _spans(waterfall: Waterfall, shown: dict[str, tuple[float, ...]], rank: int) -> list[tuple[float, float]]:
    """Return where each part begins, and its seconds; the wall time is the last."""
    ends = list(accumulate((seconds[rank] for seconds in shown.values()), initial=0.0))
    return [*((a, b - a) for a, b in pairwise(ends)), (0.0, waterfall.wall_s)]


def _bars(waterfall: Waterfall, shown: dict[str, tuple[float, ...]], rank: int) -> Json:
    spans = _spans(waterfall, shown, rank)
    return {
        "type": "bar",
        "orientation": "h",
        "name": f"rank {rank}",
        "visible": rank == 0,
        "y": list(range(len(spans))),
        "x": [seconds for _, seconds in spans],
        "base": [base for base, _ in spans],
        "marker": {"color": [color(_token(name)) for name in [*shown, "wall"]]},
        "hoverinfo": "skip",
    }


def _texts(waterfall: Waterfall, shown: dict[str, tuple[float, ...]], rank: int) -> Json:
    """Write inside wide bars, and beside the others where there is more room."""
    spans, wall_s = _spans(waterfall, shown, rank), waterfall.wall_s
    places, sides, tokens = [], [], []
    for name, (base, seconds) in zip([*shown, "wall"], spans, strict=True):
        end, inside = base + seconds, seconds >= _WIDE * wall_s
        before = not inside and base > wall_s - end
        places.append(base if inside or before else end)
        sides.append("middle left" if before else "middle right")
        tokens.append("paper" if inside and _token(name) != "faint" else "ink")
    return {
        "type": "scatter",
        "mode": "text",
        "visible": rank == 0,
        "y": list(range(len(spans))),
        "x": places,
        "text": [f" {format_seconds(s)} · {s / wall_s:.0%} " if s else "" for _, s in spans],
        "textposition": sides,
        "cliponaxis": False,
        "textfont": {"size": 12, "color": [color(token) for token in tokens]},
        "hoverinfo": "skip",
    }


def _token(name: str) -> str:
    if name in list(Phase):
        return name
    return {"wall": "ink", "evaluation": "eval", "checkpoint": "wait", MISSING: "bad"}.get(name, "faint")
