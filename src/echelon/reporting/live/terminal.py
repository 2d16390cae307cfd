"""A run on a terminal: one frame, drawn from a snapshot."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from math import isfinite
from typing import Any

from rich.console import Console, ConsoleOptions, Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from echelon.core.json_values import encodable
from echelon.core.units import format_bytes, format_metric, format_seconds
from echelon.observe.phases import PHASES, Phase, phase_name
from echelon.records.kinds import RankResources
from echelon.reporting.live.snapshot import RankView, RunView
from echelon.reporting.live.state import TimelineEntry

STYLES = {
    "completed": "bold green", "running": "bold", "starting": "yellow", "quiet": "yellow", "stopped": "yellow",
    "failed": "bold red", "refused": "bold red", "gone": "bold red", "ended": "yellow",
}  # fmt: skip
_CONTROL = dict.fromkeys((*range(32), *range(127, 160)), " ")
_LEAST_ROWS = 4
_GAP = "   "
_INSIDE = " loopback"
_SHORT = {Phase.COMMUNICATE.value: "comm."}  # a table of ranks fits 80 columns


def plain_text(text: object) -> str:
    """Text from a record without control characters, which a terminal would obey, and what no stream can write."""
    return encodable(str(text)).translate(_CONTROL)


def frame(s: RunView, height: int = 40) -> RenderableType:
    """Draw a snapshot in about `height` rows; ranks that have no room are counted."""
    n_events = min(len(s.events), max(2, height // 6))
    room = max(_LEAST_ROWS, height - 12 - n_events)
    parts: list[RenderableType] = [_head(s), _progress(s), _numbers(s)]
    if s.ranks:
        parts += [Text(), _rank_table(s.ranks[:room])]
        if len(s.ranks) > room:
            parts.append(Text(f"{len(s.ranks) - room} more ranks not shown", style="dim"))
    if s.events:
        parts += [Text(), *(_event(e) for e in s.events[-n_events:])]
    if s.torn:
        parts.append(Text(f"{s.torn} entries of the record are torn or strange and left out", style="dim"))
    return Group(*parts)


def line(s: RunView) -> str:
    """Say in one line where a run is, for a log."""
    numbers = "  ".join(f"{name} {value}" for name, value in _shown(s))
    where = f"step {s.step}/{s.total_steps}" if s.total_steps else "no step yet"
    return plain_text(f"{s.name}: {s.status}{f' ({s.message})' if s.message else ''}  {where}  {numbers}".rstrip())


def _head(s: RunView) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(plain_text(s.name), style="bold").append("  ")
    text.append(plain_text(s.status), style=STYLES.get(s.status, ""))
    if s.message:
        text.append(f": {plain_text(s.message)}")
    return text.append(f"  {plain_text(s.what)}", style="dim")


def _progress(s: RunView) -> RenderableType:
    row = Table.grid(padding=(0, 2))
    row.add_row(
        ProgressBar(total=1.0, completed=s.done, width=30),
        f"{s.done:.0%}",
        f"epoch {s.epoch}/{s.epochs}" if s.epochs else "",
        f"step {s.step}/{s.total_steps}" if s.total_steps else "",
        format_seconds(s.elapsed_s) if s.elapsed_s is not None else "",
        f"ETA {format_seconds(s.eta_s)}" if s.eta_s is not None else "",
    )
    return row


class _Items:
    """Texts in lines: a line breaks between two of them, not within one."""

    def __init__(self, items: Sequence[Text]) -> None:
        self._items = items

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        line = Text()
        for item in self._items:
            if line.cell_len and line.cell_len + len(_GAP) + item.cell_len > options.max_width:
                yield line
                line = Text()
            line = line.append(_GAP).append_text(item) if line.cell_len else item
        yield line


def _numbers(s: RunView) -> _Items:
    return _Items([Text.assemble((f"{name} ", "dim"), (value, "bold")) for name, value in _shown(s)])


def _metric(value: float | None) -> str:
    return "" if value is None else format_metric(value)


def _shown(s: RunView) -> list[tuple[str, str]]:
    best = f" (best {format_metric(s.best)})" if s.best is not None and s.best != s.value else ""
    found = {
        "train loss": _metric(s.loss) + " (last 10 s at most)" * (s.loss is not None),
        f"train {s.score_label}": _format(s.train_score, ".3f"),
        f"evaluation {s.metric}": _metric(s.value) + best,
        "samples/s": _format(s.samples_per_s, ",.0f"),
        "step": format_seconds(s.step_s) if s.step_s is not None else "",
        "communication": _format(s.communication, ".0%") + " of step time" * (s.communication is not None),
        "sent a step, all ranks": format_bytes(s.wire_bytes_per_step) if s.wire_bytes_per_step is not None else "",
    }
    return [(name, value) for name, value in found.items() if value]


def _rank_table(ranks: Sequence[RankView]) -> Table:
    hosts = len({r.host for r in ranks}) > 1
    gpus = any(isfinite(r.resources.gpu_memory_bytes) for r in ranks)
    dealt = any(r.samples is not None for r in ranks)
    phases = [str(p) for p in PHASES if any(r.phases.get(p, 0.0) >= 0.005 for r in ranks)]
    inside = all(_stays_inside(r.resources) for r in ranks)
    columns = [
        *(["host"] if hosts else []),
        *(_SHORT.get(p, phase_name(p)) for p in phases),
        "CPU",
        "memory",
        "loopback" if inside else "network",
        *(["GPU", "GPU memory"] if gpus else []),
        *(["samples"] if dealt else []),
    ]
    table = Table("rank", *columns, box=None, pad_edge=False, header_style="dim")
    for column in table.columns:
        column.justify, column.no_wrap = "right", True
    for r in ranks:
        cells = [plain_text(r.host)] if hosts else []
        cells += [_format(r.phases.get(p), ".0%") for p in phases]
        network = _network(r.resources)
        cells += [_percent(r.resources.cpu_percent), _memory(r), network.removesuffix(_INSIDE) if inside else network]
        cells += [_percent(r.resources.gpu_percent), _gpu_memory(r.resources)] if gpus else []
        cells += [_format(r.samples, "d")] if dealt else []
        table.add_row(str(r.rank), *map(Text, cells))
    return table


def _event(e: TimelineEntry) -> Text:
    text = Text(no_wrap=True, overflow="ellipsis")
    text.append(f"{datetime.fromtimestamp(e.t):%H:%M:%S}  ", style="dim")
    return text.append(f"{plain_text(e.name).replace('_', ' ')}: {plain_text(e.message)}", style="red" if e.bad else "")


def _memory(r: RankView) -> str:
    process, loaders = r.resources.rss_bytes, r.resources.loaders_rss_bytes
    if not isfinite(process):
        return format_bytes(r.memory_bytes) if r.memory_bytes is not None else "–"
    some = isfinite(loaders) and loaders > 0
    return f"{format_bytes(process)} + {format_bytes(loaders)}" if some else format_bytes(process)


def _network(used: RankResources) -> str:
    sent, received, within = used.sent_per_s, used.received_per_s, used.loopback_per_s
    if not isfinite(sent + received + within):
        return "–"
    if _stays_inside(used):
        return f"{format_bytes(within)}/s{_INSIDE}"
    return f"↑{format_bytes(sent)}/s ↓{format_bytes(received)}/s"


def _stays_inside(used: RankResources) -> bool:
    """Whether most of what a rank's machine sends stays on it."""
    return used.loopback_per_s > used.sent_per_s + used.received_per_s


def _gpu_memory(used: RankResources) -> str:
    in_use, total = used.gpu_memory_bytes, used.gpu_memory_total_bytes
    return f"{format_bytes(in_use)} of {format_bytes(total)}" if isfinite(in_use + total) else "–"


def _percent(value: float) -> str:
    return f"{value:.0f}%" if isfinite(value) else "–"


def _format(value: Any, how: str) -> str:
    return "" if value is None else format(value, how)
