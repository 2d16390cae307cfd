"""A flow as a page that opens offline: its graph with times and states, then a table with links."""

from __future__ import annotations

import html
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from echelon.core.columns import seconds_column
from echelon.core.files import write_atomic
from echelon.core.units import format_seconds
from echelon.flows.base import STEPS_FOLDER, Flow
from echelon.flows.state import LOG_FILE, PAGE_FILE, Stands, StepStatus, step_statuses

_WIDTH, _HEIGHT, _GAP_X, _GAP_Y, _MARGIN = 190, 46, 60, 16, 12  # of a box, in pixels
_LETTERS = 21  # of a name, that fit a box
_NUMBER = ' class="number"'
_COLOURS = {
    Stands.DONE: "#2e7d32", Stands.RUNS: "#1565c0", Stands.FAILED: "#c62828", Stands.CUT_SHORT: "#ef6c00",
    Stands.BLOCKED: "#8e24aa", Stands.WAITS: "#757575",
}  # fmt: skip
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem; max-width: 75rem; color: #222; background: #fff; }
svg { max-width: 100%; height: auto; } table { font-variant-numeric: tabular-nums; }
td, th { text-align: left; padding: .2rem 1rem .2rem 0; vertical-align: top; }
td.number, th.number { text-align: right; }
@media (prefers-color-scheme: dark) { body { color: #ddd; background: #1b1b1b; } a { color: #8ab4f8; } }
"""


def write_page(flow: Flow, folder: Path, steps: Sequence[StepStatus] | None = None) -> Path:
    """Write the page of a flow into its folder; returns the file.

    Args:
        steps: how they stand; left out: as their records say.
    """
    path = folder / PAGE_FILE
    write_atomic(path, page_text(flow, step_statuses(flow, folder) if steps is None else steps))
    return path


def page_text(flow: Flow, steps: Sequence[StepStatus]) -> str:
    """Return the page as HTML."""
    goes_on = any(each.stands is Stands.RUNS for each in steps)
    refresh = '<meta http-equiv="refresh" content="3">' if goes_on else ""
    total = format_seconds(sum(each.seconds for each in steps))
    head = f'<!doctype html><html lang="en"><meta charset="utf-8">{refresh}<title>{html.escape(flow.name)}</title>'
    words = f"{summary(steps)}; {total} of steps. Written {time.strftime('%Y-%m-%d %H:%M:%S')}."
    return (
        f"{head}<style>{_STYLE}</style><h1>Flow {html.escape(flow.name)}</h1><p>{html.escape(words)}</p>"
        f"{graph_svg(flow, steps)}{_table(steps)}</html>\n"
    )


def summary(steps: Sequence[StepStatus]) -> str:
    """Return how many steps stand how, in words."""
    counts = {stands: sum(each.stands is stands for each in steps) for stands in Stands}
    return f"{len(steps)} steps: " + ", ".join(f"{count} {stands}" for stands, count in counts.items() if count)


def levels(flow: Flow) -> Mapping[str, int]:
    """Return how many steps lie before each one, on the longest way to it."""
    found: dict[str, int] = {}

    def level(name: str) -> int:
        """Return one's."""
        if name not in found:
            found[name] = 1 + max((level(before) for before in flow.steps[name].before), default=-1)
        return found[name]

    for name in flow.steps:
        level(name)
    return found


def graph_svg(flow: Flow, steps: Sequence[StepStatus]) -> str:
    """Return the graph as a drawing: a column for each level, a line for each need."""
    column = levels(flow)
    rows: dict[int, int] = {}
    places: dict[str, tuple[int, int]] = {}
    for name in flow.steps:
        row = rows[column[name]] = rows.get(column[name], -1) + 1
        places[name] = (_MARGIN + column[name] * (_WIDTH + _GAP_X), _MARGIN + row * (_HEIGHT + _GAP_Y))
    width = max(x for x, _ in places.values()) + _WIDTH + _MARGIN
    height = max(y for _, y in places.values()) + _HEIGHT + _MARGIN
    lines = []
    for name, step in flow.steps.items():
        lines += [_line(places[before], places[name], column[name] - column[before]) for before in step.before]
    arrows = "".join(f'<path d="{line}" fill="none" stroke="#9e9e9e" stroke-width="1.5"/>' for line in lines)
    boxes = "".join(_box(each, *places[each.step.name]) for each in steps)
    label = html.escape(f"{flow.name}: {summary(steps)}")
    return (
        f'<svg viewBox="0 0 {width} {height}" width="{width}" role="img" aria-label="{label}" '
        f'font-family="system-ui, sans-serif">{arrows}{boxes}</svg>'
    )


def _line(from_box: tuple[int, int], to_box: tuple[int, int], columns: int) -> str:
    """Return the path between two boxes so many columns apart; it passes those between them below the first's row."""
    from_x, to_x = from_box[0] + _WIDTH, to_box[0]
    from_y, to_y = from_box[1] + _HEIGHT / 2, to_box[1] + _HEIGHT / 2
    if columns == 1:
        return f"M{from_x} {from_y:g} {_curve(from_x, from_y, to_x, to_y)}"
    low, left, right = from_box[1] + _HEIGHT + _GAP_Y / 2, from_x + _GAP_X, to_x - _GAP_X
    return f"M{from_x} {from_y:g} {_curve(from_x, from_y, left, low)} L{right} {low:g} {_curve(right, low, to_x, to_y)}"


def _curve(from_x: float, from_y: float, to_x: float, to_y: float) -> str:
    middle = (from_x + to_x) / 2
    return f"C{middle:g} {from_y:g} {middle:g} {to_y:g} {to_x:g} {to_y:g}"


def _box(status: StepStatus, x: int, y: int) -> str:
    name = status.step.name
    shown = name if len(name) <= _LETTERS else f"{name[: _LETTERS - 1]}…"
    took = f", {format_seconds(status.seconds)}" if status.seconds else ""
    said = f"{status.step.kind}: {status.stands}{took}"
    box = (
        f'<rect x="{x}" y="{y}" width="{_WIDTH}" height="{_HEIGHT}" rx="6" fill="{_COLOURS[status.stands]}"/>'
        f'<text x="{x + 10}" y="{y + 19}" fill="#fff" font-size="13" font-weight="600">{html.escape(shown)}</text>'
        f'<text x="{x + 10}" y="{y + 36}" fill="#fff" font-size="12">{said}</text>'
    )
    box = f"<g><title>{html.escape(name)} {html.escape(status.message)}</title>{box}</g>"
    return f'<a href="{html.escape(status.report)}">{box}</a>' if status.report else box


def _table(steps: Sequence[StepStatus]) -> str:
    took = seconds_column("time", [each.seconds or None for each in steps])
    with_gpus = any(each.step.resources.gpus for each in steps)
    rows = []
    for each, seconds in zip(steps, took.cells, strict=True):
        report = f'<a href="{html.escape(each.report)}">report</a>' if each.report else ""
        needs, hours = each.step.resources, each.seconds / 3600
        costs = [f"{hours * needs.cores:.3f}", *[f"{hours * needs.gpus:.3f}"] * with_gpus]
        name, time_cell = html.escape(each.step.name), seconds if each.seconds else ""
        words = [name, each.step.kind, each.stands]
        numbers = [time_cell, *(cost if hours else "" for cost in costs), str(each.starts)]
        rows.append(f"<tr>{_cells(words)}{_cells(numbers, _NUMBER)}{_cells([report, html.escape(each.message)])}</tr>")
    numbers = [took.head, "core hours", *["GPU hours"] * with_gpus, "starts"]
    head = _cells(["step", "does", "state"], kind="th") + _cells(numbers, _NUMBER, "th") + _cells(["", ""], kind="th")
    logs = f"<p>Logs: <code>{STEPS_FOLDER}/STEP/{LOG_FILE}</code>.</p>"
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>{logs}"


def _cells(cells: Sequence[str], attributes: str = "", kind: str = "td") -> str:
    return "".join(f"<{kind}{attributes}>{cell}</{kind}>" for cell in cells)
