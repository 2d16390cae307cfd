"""Rows of a study's tables, from the record of a run.

Seconds run from the first step on, and count whatever stops the steps: evaluations, checkpoints, recording. Imports and
reading the data before are left out, for they are the same work whatever the candidate. Bytes are those that all ranks
sent.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path

from echelon.records.before_tasks import primary_of
from echelon.records.kinds import Evaluation, ServerWindow, Steps, WorkerJoined
from echelon.reporting.report.charts_server import staleness_counts
from echelon.reporting.report.records import RunRecord, load_run
from echelon.reporting.report.summary import Summary, chosen_periods, summarise
from echelon.reporting.report.timing import Timing, measure
from echelon.reporting.report.whole_run import WholeRun
from echelon.study.base import PlannedRun
from echelon.study.metric import PrimaryMetric
from echelon.study.tables import PAUSE_REASONS, PointRow, RunRow


def rows_of(run: PlannedRun, folder: Path, status: str, message: str) -> tuple[RunRow, list[PointRow]]:
    """Read a run's folder; returns its row and one row per evaluation.

    What is torn or missing is left out, and said in the row's message.
    """
    record = load_run(folder)
    summary, timing = summarise(record), measure(record)
    metric = PrimaryMetric.of(primary_of(record.last_start))
    whole = summary.whole
    points = [_point(run, (record, whole), number, e, metric) for number, e in enumerate(record.kept_evaluations())]
    torn = " ".join(record.notes)
    wire_bytes = None if summary.inner_axes else _spent(record, None)[0]
    row = RunRow(
        run.name, run.candidate, run.terms, run.seed, status, " ".join(text for text in (message, torn) if text),
        train_s=whole.steps_s if whole else 0.0, run_s=whole.seconds if whole else None, wire_bytes=wire_bytes,
        density=_density(record.windows), link=run.settings.get("launch.link"), lr=_rate(run, record),
        periods=_periods(record),
    )  # fmt: skip
    if whole is not None:
        pauses = {f"pause_{name}": whole.pauses.get(name, 0.0) for name in PAUSE_REASONS}
        row = replace(row, **pauses)  # type: ignore[arg-type]
    evaluations = record.kept_evaluations()
    row = _with_outcome(row, summary, points, metric)
    row = replace(row, eval_samples=(evaluations[-1].samples or None) if evaluations else None)
    return _with_placement(_with_staleness(_with_costs(row, summary, timing), record), record), points


def _periods(record: RunRecord) -> str | None:
    """Return the periods that were chosen as the run went; None: none were."""
    changes = chosen_periods(record)
    held = [(0, changes[0].old), *((change.step, change.new) for change in changes)] if changes else []
    return " ".join(f"{step}:{period}" for step, period in held) or None


def _rate(run: PlannedRun, record: RunRecord) -> float | None:
    """Return the learning rate that a run has, by its own description."""
    described = record.setting("optimizer", "lr") or run.settings.get("optimizer.lr")
    return None if described is None else float(described)


def _with_outcome(row: RunRow, summary: Summary, points: Sequence[PointRow], metric: PrimaryMetric) -> RunRow:
    last = points[-1] if points else None
    return replace(
        row,
        whole_s=summary.seconds,
        startup_s=summary.startup_s,
        steps=summary.steps,
        epochs=summary.epochs,
        workers=summary.workers or None,
        parameters=summary.parameters,
        metric=metric.name,
        direction=metric.direction,
        metric_label=metric.label,
        percent=int(metric.percent),
        chance=metric.chance,
        best=max((p.value for p in points if p.value is not None), key=metric.score, default=None),
        eval_loss=last.loss if last else None,
        metrics=last.metrics if last else {},
        nonfinite_step=summary.nonfinite_step,
        restarts=summary.restarts,
    )


def _with_costs(row: RunRow, summary: Summary, timing: Timing | None) -> RunRow:
    memory = timing.memory_bytes if timing else ()
    phases = {f"phase_{name}": seconds for name, seconds in summary.phases.items()}
    return replace(
        row,
        wire_bytes_per_step=None if summary.inner_axes else summary.wire_bytes_per_step,
        samples_per_s=summary.samples_per_s,
        step_s=summary.step_s,
        exposed_s=timing.exposed_s if timing else None,
        memory_bytes=max(memory, default=None),
        memory_bytes_by_rank=" ".join(f"{b:.0f}" for b in memory) or None,
        **{f.name: phases.get(f.name) for f in fields(RunRow) if f.name.startswith("phase_")},  # type: ignore[arg-type]
    )


def _with_staleness(row: RunRow, record: RunRecord) -> RunRow:
    """Add up the last histograms of all servers: how many updates a gradient's parameters were behind."""
    counts: Counter[int] = Counter()
    for window in {window.name: window for window in record.of(ServerWindow)}.values():
        counts.update(staleness_counts(window))
    total = sum(counts.values())
    return replace(
        row,
        staleness=" ".join(f"{k}:{n}" for k, n in sorted(counts.items())) or None,
        staleness_mean=sum(k * n for k, n in counts.items()) / total if total else None,
    )


def _with_placement(row: RunRow, record: RunRecord) -> RunRow:
    """Add threads and cores of the workers, as they recorded them when they began."""
    start = record.last_start
    cores = [*(start.affinity if start else ()), *(worker.affinity for worker in record.of(WorkerJoined))]
    affinity = "; ".join(sorted({c for c in cores if c})) or None
    return replace(row, threads=start.threads if start else None, affinity=affinity)


def _density(windows: Sequence[Steps]) -> float | None:
    """Return the share of the encoded elements that rank 0 sent, the mean over the steps; None: no sparse codec."""
    known = [(w.count, w.density) for w in windows if w.density is not None]
    steps = sum(n for n, _ in known)
    return sum(n * share for n, share in known) / steps if steps else None


def _point(
    run: PlannedRun, told: tuple[RunRecord, WholeRun | None], number: int, evaluation: Evaluation, metric: PrimaryMetric
) -> PointRow:
    record, whole = told
    n_bytes, samples = _spent(record, evaluation)
    if record.last_start and record.last_start.inner_axes:
        n_bytes = 0.0
    seconds = whole.at(evaluation.t) if whole else 0.0
    return PointRow(
        run.name, run.candidate, run.terms, run.seed, number, evaluation.epoch, evaluation.step, samples, seconds,
        n_bytes, _finite(evaluation.loss), metric.name, _finite_metrics(evaluation.metrics),
    )  # fmt: skip


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _finite_metrics(metrics: Mapping[str, float | None]) -> dict[str, float | None]:
    return {name: value for name, value in metrics.items() if _finite(value) is not None}


def _spent(record: RunRecord, until: Evaluation | None) -> tuple[float, float]:
    """Add up (bytes, samples) of the steps up to an evaluation's; what a restart undid was spent as well.

    A window that reaches past the step counts by its share: asynchronous workers go on while one of them evaluates.
    """
    n_bytes = samples = 0.0
    for attempt in record.attempts:
        last = until is not None and any(evaluation is until for evaluation in attempt.evaluations)
        for window in attempt.windows:
            share = _share(window, until.step) if last and until is not None else 1.0
            n_bytes += share * window.wire_bytes
            samples += share * window.samples
        if last:
            break
    return n_bytes, samples


def _share(window: Steps, step: int) -> float:
    """Return which share of a window's steps is not past a step."""
    return max(0.0, window.count - max(0, window.step - step)) / window.count
