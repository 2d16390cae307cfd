"""The page's tables: the verdicts, all runs, and what did not complete."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from urllib.parse import quote

from echelon.core.columns import NONE, Column, bytes_column, number_column, seconds_column
from echelon.core.units import format_seconds, rounded
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


def verdict_table(group: ComparisonGroup, scene: Scene) -> Table:
    """Return one row per candidate under the same terms: its verdict and the numbers behind it.

    Which pauses there were, the words beside it say.
    """
    numbers, metric = {style.label: style.number for style in scene.styles}, scene.metric
    compared = group.comparisons

    def means(column: str) -> list[float | None]:
        """Return the mean of each candidate's runs."""
        values = [spread(scene.runs, c.candidate, column) for c in compared]
        return [None if value is None else value.mean for value in values]

    columns = [
        Column("candidate", [f"{numbers[c.candidate]} {c.candidate}" for c in compared]),
        Column("verdict", [_verdict(c, metric) for c in compared]),
        Column("times as fast to the end", [_interval(c.to_end, ".2f", "x") for c in compared]),
        Column("times as fast to target", [_interval(c.to_target, ".2f", "x") for c in compared]),
        Column(f"{metric.unit} of {metric.label}", [_interval(c.points, "+.2f", "") for c in compared]),
        Column(f"final {metric.label}", [_write(value, metric.text) for value in means("final")]),
        seconds_column("whole run", means("end_s")),
        Column("pauses", [_pauses(scene, c.candidate) for c in compared]),
        seconds_column("time to target", means("target_s"), unit_of=means("end_s")),
        bytes_column("sent to target", means("target_bytes")),
        seconds_column("a step", means("step_s")),
        bytes_column("sent a step", means("wire_bytes_per_step")),
        bytes_column("memory", means("memory_bytes")),
    ]
    seeds = _seeds(max(c.seeds for c in compared))
    uncounted = any(r.status == COMPLETED and r.wire_bytes is None for r in scene.runs)
    note = "; what is sent inside a replica (fsdp, tp, pp) is not counted" if uncounted else ""
    return Table.of(f"Each candidate against the baseline, means over {seeds}{note}", columns)


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
    numbers, metric, each = {style.label: style.number for style in scene.styles}, group.metric, group.step_statuses
    columns = [
        Column("candidate", [f"{numbers.get(s.candidate, '')} {s.candidate}".strip() for s in each]),
        Column(f"{metric.label} then", [_write(s.value, metric.text) for s in each]),
        Column(f"{metric.unit} of {metric.label}", [_interval(s.points, "+.2f", "") for s in each]),
        Column("epochs ended by then", [str(s.epochs) for s in each]),
        seconds_column("whole run", [s.run_s for s in each]),
    ]
    return Table.of(f"After {format_seconds(group.seconds)} from the first step, the best first", columns)


def run_table(runs: list[RunRow], with_page: Collection[str]) -> Table:
    """Return one row per run, what matters most first; those `with_page` lead to theirs, which name the pauses.

    A status and a learning rate that all have are left out: the page says them elsewhere, and has not that much room.
    """
    statuses, rates = [r.status for r in runs], [r.lr for r in runs]
    columns = [
        Column("run", [r.run for r in runs]),
        Column(metric_of(runs).label, [_write(r.final, r.primary.text) for r in runs]),
        seconds_column("whole run", [r.end_s for r in runs]),
        seconds_column("time to target", [r.target_s for r in runs], unit_of=[r.end_s for r in runs]),
        *([Column("status", statuses)] if set(statuses) != {COMPLETED} else []),
        Column("seed", [str(r.seed) for r in runs]),
        *([number_column("lr", rates)] if len(set(rates)) > 1 else []),
        seconds_column("steps", [r.train_s for r in runs], unit_of=[r.end_s for r in runs]),
        Column("pauses", [_paused([r]) for r in runs]),
        seconds_column("command", [r.whole_s for r in runs]),
        Column("samples/s", [_write(r.samples_per_s, _count) for r in runs]),
        seconds_column("a step", [r.step_s for r in runs]),
        bytes_column("sent", [r.wire_bytes for r in runs]),
        _memory_by_rank(runs),
    ]
    pages = [f"{RUNS_FOLDER}/{quote(r.run)}/{REPORT_FILE}" if r.run in with_page else "" for r in runs]
    return Table.of("Every run", columns, pages)


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


def _write(value: float | None, write: Callable[[float], str]) -> str:
    return NONE if value is None else write(value)


def _pauses(scene: Scene, candidate: str) -> str:
    return _paused([r for r in scene.runs if r.candidate == candidate and r.status == COMPLETED])


def _paused(runs: Sequence[RunRow]) -> str:
    """Write the share of runs, from the first step to the end, in which no step went on."""
    whole_s = sum(r.run_s or 0.0 for r in runs)
    return f"{sum(sum(r.pauses.values()) for r in runs) / whole_s:.1%}" if whole_s else NONE


def _memory_by_rank(runs: Sequence[RunRow]) -> Column:
    by_run = [[float(n_bytes) for n_bytes in (r.memory_bytes_by_rank or "").split()] for r in runs]
    column = bytes_column("memory by rank", [n_bytes for ranks in by_run for n_bytes in ranks])
    cells = iter(column.cells)
    return Column(column.head, [" / ".join(next(cells) for _ in ranks) or NONE for ranks in by_run])


def _count(value: float) -> str:
    return f"{value:,.0f}"
