"""The page's tables: the verdicts, all runs, and what did not complete."""

from __future__ import annotations

from collections.abc import Callable

from echelon.core.units import format_bytes, format_seconds, rounded
from echelon.reporting.report.tables import Table
from echelon.study.compare import Comparison, Group, Verdict
from echelon.study.intervals import Interval
from echelon.study.page.curves import Scene
from echelon.study.page.means import spread
from echelon.study.predictions import CLOSE, Checked
from echelon.study.rows import COMPLETED, RunRow

NONE = "–"


def verdict_table(group: Group, scene: Scene) -> Table:
    """One row per candidate under the same terms: its verdict and the numbers behind it."""
    numbers = {key.label: key.number for key in scene.keys}
    head = [
        "candidate", "verdict", "times as fast to target", "points of accuracy", "final accuracy", "to target",
        "sent to target", "a step", "sent a step", "memory",
    ]  # fmt: skip
    rows = []
    for c in group.comparisons:
        cells = [
            f"{numbers[c.candidate]} {c.candidate}",
            _verdict(c),
            _interval(c.to_target, ".2f", "x"),
            _interval(c.points, "+.2f", ""),
        ]
        rows.append(cells + [_cell(scene, c.candidate, column, write) for column, write in _COLUMNS])
    return Table(
        "Each candidate against the baseline, means over the seeds; 95% bootstrap intervals in brackets", head, rows
    )


def prediction_table(checked: list[Checked]) -> Table | None:
    """What the baseline's record predicted for each candidate's steps, beside what was measured."""
    if not checked:
        return None
    rows = [
        [c.candidate, f"{c.predicted:.2f}x", f"{c.measured:.2f}x", f"{c.off:+.0%}", "yes" if c.holds else "no"]
        for c in checked
    ]
    head = ["candidate", "predicted", "measured", "off by", f"within {CLOSE:.0%}"]
    return Table("Times as fast by steps: predicted from the baseline's record alone, and measured", head, rows)


def run_table(runs: list[RunRow]) -> Table:
    """Every run as it was."""
    head = [
        "run",
        "seed",
        "status",
        "accuracy",
        "to target",
        "training",
        "whole run",
        "samples/s",
        "a step",
        "sent",
        "memory by rank",
    ]
    rows = []
    for r in runs:
        rows.append(
            [
                r.run, str(r.seed), r.status, _write(r.top1, _percent), _write(r.target_s, format_seconds),
                _write(r.train_s, format_seconds), _write(r.whole_s, format_seconds), _write(r.samples_per_s, _count),
                _write(r.step_s, format_seconds), _write(r.wire_bytes, format_bytes),
                _by_rank(r.memory_bytes_by_rank),
            ]
        )  # fmt: skip
    return Table("Every run", head, rows)


def failures(runs: list[RunRow]) -> list[str]:
    """What did not complete, and what completed with something torn, with the reason: a sentence for each candidate."""
    told: dict[tuple[str, str, str, str], list[str]] = {}
    for r in runs:
        if r.status != COMPLETED or r.message:
            told.setdefault((r.candidate, r.terms, r.status, r.message), []).append(str(r.seed))
    words = []
    for (candidate, terms, status, message), seeds in told.items():
        under = f" under {terms}" if terms else ""
        which = f"seed{'s' * (len(seeds) > 1)} {', '.join(seeds)}"
        words.append(f"{candidate}{under}, {which}: {status}; {message or 'no reason is known'}")
    return words


def _verdict(c: Comparison) -> str:
    if c.verdict is Verdict.FASTER_AT_A_LOSS and c.points is not None:
        return f"{c.verdict} of {-c.points.value:.2f} points"
    return str(c.verdict)


def _interval(interval: Interval | None, form: str, unit: str) -> str:
    if interval is None:
        return NONE
    said = f"{rounded(interval.value, 2):{form}}{unit}"
    if interval.low is None or interval.high is None:
        return said
    return f"{said} ({rounded(interval.low, 2):{form}} to {rounded(interval.high, 2):{form}})"


def _cell(scene: Scene, candidate: str, column: str, write: Callable[[float], str]) -> str:
    found = spread(scene.runs, candidate, column)
    return NONE if found is None else write(found.mean)


def _write(value: float | None, write: Callable[[float], str]) -> str:
    return NONE if value is None else write(value)


def _by_rank(memory: str | None) -> str:
    return ", ".join(format_bytes(float(n_bytes)) for n_bytes in memory.split()) if memory else NONE


def _percent(value: float) -> str:
    return f"{value:.2%}"


def _count(value: float) -> str:
    return f"{value:,.0f}"


_COLUMNS: tuple[tuple[str, Callable[[float], str]], ...] = (
    ("top1", _percent), ("target_s", format_seconds), ("target_bytes", format_bytes),
    ("step_s", format_seconds),
    ("wire_bytes_per_step", format_bytes), ("memory_bytes", format_bytes),
)  # fmt: skip
