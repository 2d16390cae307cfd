"""The page's tables: the verdicts, all runs, and what did not complete."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from urllib.parse import quote

from echelon.core.units import format_bytes, format_seconds, rounded
from echelon.reporting.report import REPORT_FILE
from echelon.reporting.report.tables import Table
from echelon.study.base import COMPLETED
from echelon.study.compare import Comparison, ComparisonGroup, Verdict, metric_of
from echelon.study.equal_time import TimeGroup
from echelon.study.folder import RUNS_FOLDER
from echelon.study.intervals import FEWEST_SEEDS, Interval, coverage_of
from echelon.study.metric import PrimaryMetric
from echelon.study.page.scene import Scene, spread
from echelon.study.predictions import CLOSE, PredictionCheck, gain_of
from echelon.study.tables import RunRow

NONE = "–"


def verdict_table(group: ComparisonGroup, scene: Scene) -> Table:
    """Return one row per candidate under the same terms: its verdict and the numbers behind it.

    Which pauses there were, the words beside it say.
    """
    numbers, metric = {style.label: style.number for style in scene.styles}, scene.metric
    columns = (("final", metric.text), *_COLUMNS)
    head = [
        "candidate", "verdict", "times as fast to the end", "times as fast to target",
        f"{metric.unit} of {metric.label}", f"final {metric.label}", "whole run", "pauses", "time to target",
        "sent to target", "a step", "sent a step", "memory",
    ]  # fmt: skip
    rows = []
    for c in group.comparisons:
        cells = [
            f"{numbers[c.candidate]} {c.candidate}",
            _verdict(c, metric),
            _interval(c.to_end, ".2f", "x"),
            _interval(c.to_target, ".2f", "x"),
            _interval(c.points, "+.2f", ""),
        ]
        first, second, *others = [_cell(scene, c.candidate, column, write) for column, write in columns]
        rows.append([*cells, first, second, _pauses(scene, c.candidate), *others])
    return Table(
        f"Each candidate against the baseline, means over {_seeds(max(c.seeds for c in group.comparisons))}",
        head,
        rows,
    )


def _seeds(n: int) -> str:
    """Name what means are over, and what the intervals in brackets are."""
    if n < FEWEST_SEEDS:
        return f"{n} seed{'s' * (n != 1)}: too few for an interval"
    holds = f", which hold the truth in about {coverage_of(n):.0%} of studies" if n < 6 else ""
    return f"{n} seeds; in brackets 95% bootstrap intervals{holds}"


def prediction_table(checked: list[PredictionCheck]) -> Table | None:
    """Return what the baseline's record predicted for each candidate, beside what was measured."""
    if not checked:
        return None
    rows = [
        [
            c.candidate, f"{c.predicted:.2f}x", f"{c.measured:.2f}x", f"{rounded(c.off, 2):+.0%}",
            "yes" if c.holds else "no",
        ]
        for c in checked
    ]  # fmt: skip
    head = ["candidate", "predicted", "measured", "off by", f"within {CLOSE:.0%}"]
    return Table(f"{gain_of(checked)}: predicted from the baseline's record alone, and measured", head, rows)


def time_table(group: TimeGroup, scene: Scene) -> Table:
    """Return one row per candidate, the best after equal time first."""
    numbers, metric = {style.label: style.number for style in scene.styles}, group.metric
    rows = [
        [
            f"{numbers.get(s.candidate, '')} {s.candidate}".strip(), _write(s.value, metric.text),
            _interval(s.points, "+.2f", ""), str(s.epochs), _write(s.run_s, format_seconds),
        ]
        for s in group.step_statuses
    ]  # fmt: skip
    head = [
        "candidate",
        f"{metric.label} then",
        f"{metric.unit} of {metric.label}",
        "epochs ended by then",
        "whole run",
    ]
    return Table(f"After {format_seconds(group.seconds)} from the first step, the best first", head, rows)


def run_table(runs: list[RunRow], with_page: Collection[str]) -> Table:
    """Return one row per run, what matters most first; those `with_page` lead to theirs, which name the pauses."""
    head = [
        "run", metric_of(runs).label, "whole run", "time to target", "status", "seed", "lr", "steps", "pauses",
        "command", "samples/s", "a step", "sent", "memory by rank",
    ]  # fmt: skip
    rows = []
    for r in runs:
        rows.append(
            [
                r.run, _write(r.final, r.primary.text), _write(r.end_s, format_seconds),
                _write(r.target_s, format_seconds), r.status, str(r.seed), _write(r.lr, "{:g}".format),
                _write(r.train_s, format_seconds), _paused([r]),
                _write(r.whole_s, format_seconds), _write(r.samples_per_s, _count),
                _write(r.step_s, format_seconds), _write(r.wire_bytes, format_bytes),
                _by_rank(r.memory_bytes_by_rank),
            ]
        )  # fmt: skip
    pages = [f"{RUNS_FOLDER}/{quote(r.run)}/{REPORT_FILE}" if r.run in with_page else "" for r in runs]
    return Table("Every run", head, rows, pages)


def failures(runs: list[RunRow]) -> list[str]:
    """Return a sentence, for each candidate, on runs that did not complete or have a torn record, with the reason."""
    seeds_of: dict[tuple[str, str, str, str], list[str]] = {}
    for r in runs:
        if r.status != COMPLETED or r.message:
            seeds_of.setdefault((r.candidate, r.terms, r.status, r.message), []).append(str(r.seed))
    words = []
    for (candidate, terms, status, message), seeds in seeds_of.items():
        under = f" under {terms}" if terms else ""
        which = f"seed{'s' * (len(seeds) > 1)} {', '.join(seeds)}"
        words.append(f"{candidate}{under}, {which}: {status}; {message or 'no reason is known'}")
    return words


def _verdict(c: Comparison, metric: PrimaryMetric) -> str:
    if c.verdict is Verdict.FASTER_AT_A_LOSS and c.points is not None:
        return f"{c.verdict} of {-c.points.value:.2f} {metric.unit}"
    return str(c.verdict)


def _interval(interval: Interval | None, form: str, unit: str) -> str:
    if interval is None:
        return NONE
    text = f"{rounded(interval.value, 2):{form}}{unit}"
    if interval.low is None or interval.high is None:
        return text
    return f"{text} ({rounded(interval.low, 2):{form}} to {rounded(interval.high, 2):{form}})"


def _cell(scene: Scene, candidate: str, column: str, write: Callable[[float], str]) -> str:
    values = spread(scene.runs, candidate, column)
    return NONE if values is None else write(values.mean)


def _write(value: float | None, write: Callable[[float], str]) -> str:
    return NONE if value is None else write(value)


def _pauses(scene: Scene, candidate: str) -> str:
    return _paused([r for r in scene.runs if r.candidate == candidate and r.status == COMPLETED])


def _paused(runs: Sequence[RunRow]) -> str:
    """Write the share of runs, from the first step to the end, in which no step went on."""
    whole_s = sum(r.run_s or 0.0 for r in runs)
    return f"{sum(sum(r.pauses.values()) for r in runs) / whole_s:.1%}" if whole_s else NONE


def _by_rank(memory: str | None) -> str:
    return ", ".join(format_bytes(float(n_bytes)) for n_bytes in memory.split()) if memory else NONE


def _count(value: float) -> str:
    return f"{value:,.0f}"


_COLUMNS: tuple[tuple[str, Callable[[float], str]], ...] = (
    ("end_s", format_seconds),
    ("target_s", format_seconds), ("target_bytes", format_bytes), ("step_s", format_seconds),
    ("wire_bytes_per_step", format_bytes), ("memory_bytes", format_bytes),
)  # fmt: skip
