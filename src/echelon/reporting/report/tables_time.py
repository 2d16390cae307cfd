"""Tables on time: the waterfall, who was waited for, what changes would gain, and the slowest steps."""

from __future__ import annotations

from echelon.core.units import format_bytes, format_seconds, rounded
from echelon.reporting.report.charts_waterfall import part_name
from echelon.reporting.report.records import RunRecord
from echelon.reporting.report.summary import Summary
from echelon.reporting.report.tables import Table
from echelon.reporting.report.timing import Timing


def waterfall_table(record: RunRecord, summary: Summary) -> Table | None:
    """Seconds by rank and part, whose sum is the wall time."""
    waterfall = summary.waterfall
    if waterfall is None:
        return None
    head = ["rank", *(part_name(name, record.served) for name in waterfall.parts), "wall time"]
    rows = [
        [str(r), *(f"{seconds[r]:.2f}" for seconds in waterfall.parts.values()), f"{waterfall.wall_s:.2f}"]
        for r in range(waterfall.ranks)
    ]
    return Table("Seconds of the whole run, by rank and part", head, rows)


def critical_table(record: RunRecord, timing: Timing | None) -> Table | None:
    """How often each rank was the one that the others waited for, and what it spent in garbage collection."""
    if timing is None or timing.communication is None:
        return None
    critical, gc_s = timing.communication.critical, timing.gc_s
    what = "steps" if timing.communication.by_step else "windows of steps"
    head = ["rank", "host", f"share of {what} in which the others waited for it"]
    head += ["garbage collection per step"] if gc_s else []
    rows = []
    for rank, share in enumerate(critical):
        row = [str(rank), record.rank_host(rank) or "–", f"{share:.0%}"]
        rows.append(row + ([format_seconds(gc_s[rank])] if gc_s else []))
    return Table("The critical rank: the last to be ready for communication", head, rows)


def prediction_table(summary: Summary) -> Table | None:
    """What other ways to communicate would do to a step."""
    if not summary.predictions:
        return None
    head = ["change", "a step would take", "times as fast", "saved of a step", "sent by a rank per step"]
    rows = [
        [p.label, format_seconds(p.then_s), f"{p.gain:.2f}x", f"{rounded(p.saves, 2):.0%}", format_bytes(p.wire_bytes)]
        for p in summary.predictions
    ]
    return Table("What other ways to communicate would gain, computed from the record", head, rows)


def slow_step_table(summary: Summary) -> Table | None:
    """The slowest steps and their causes."""
    if not summary.slow_steps:
        return None
    told = any(s.waited_for is not None for s in summary.slow_steps)
    rows = []
    for s in summary.slow_steps:
        rank = [f"rank {s.waited_for}" if s.waited_for is not None else "–"] if told else []
        rows.append([str(s.step), format_seconds(s.seconds), format_seconds(s.median_s), *rank, s.cause])
    head = ["step", "took", "median then", *(["the others waited for"] if told else []), "cause"]
    return Table("Steps that took over 3 times the median", head, rows)


def communication_words(summary: Summary) -> list[str]:
    """Say what communication takes in all, and what of it is hidden."""
    c, step_s = summary.communication, summary.step_s
    if c is None or not step_s or c.total_s / step_s < 0.01:
        return []
    hidden = f"{format_seconds(c.hidden_s)} of it hidden behind backward, " if c.timed else ""
    waited = f" Beside it, ranks wait {format_seconds(c.waited_s)} a step for slower ones." if c.waited_s > 0 else ""
    return [
        f"Communication takes {format_seconds(c.total_s)} of a step of {format_seconds(step_s)}: {hidden}"
        f"{format_seconds(c.exposed_s)} exposed.{waited}"
    ]
