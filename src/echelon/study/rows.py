"""A run as a row, and each of its evaluations as a row: what the tables hold and everything else is made from.

Seconds are those of training steps, added up over the windows of the record: start-up, evaluations and checkpoints are
left out, for they are the same work whatever the candidate. Bytes are those that all ranks sent.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from echelon.reporting.report.records import Evaluation, RunRecord, Window, load_run
from echelon.reporting.report.summary import Summary, kept_evaluations, summarise
from echelon.reporting.report.timing import Timing, measure
from echelon.study.base import PlannedRun

COMPLETED = "completed"


@dataclass(frozen=True)
class RunRow:
    """One run. None where the record holds no answer; `phase_*` are seconds per step, mean over the ranks.

    `threads` are those of a worker, `affinity` the cores that its workers may run on (such as `0-3`; where they differ,
    each set once).

    `predicted_step_s` is what the baseline's record of the same seed predicted for `step_s`.
    """

    run: str
    candidate: str
    terms: str
    seed: int
    status: str
    message: str
    train_s: float | None = None
    whole_s: float | None = None
    startup_s: float | None = None
    steps: int | None = None
    epochs: float | None = None
    workers: int | None = None
    link: str | None = None
    threads: int | None = None
    affinity: str | None = None
    parameters: int | None = None
    classes: int | None = None
    eval_samples: int | None = None
    top1: float | None = None
    best_top1: float | None = None
    macro_f1: float | None = None
    eval_loss: float | None = None
    nonfinite_step: int | None = None
    wire_bytes: float | None = None
    wire_bytes_per_step: float | None = None
    samples_per_s: float | None = None
    step_s: float | None = None
    exposed_s: float | None = None
    phase_data: float | None = None
    phase_forward: float | None = None
    phase_backward: float | None = None
    phase_communicate: float | None = None
    phase_update: float | None = None
    phase_other: float | None = None
    memory_bytes: float | None = None
    memory_bytes_by_rank: str | None = None
    staleness: str | None = None
    staleness_mean: float | None = None
    density: float | None = None
    restarts: int | None = None
    predicted_step_s: float | None = None
    target: float | None = None
    target_s: float | None = None
    target_bytes: float | None = None
    command: str | None = None


@dataclass(frozen=True)
class PointRow:
    """One evaluation of one run: what had been spent by then, and what was reached."""

    run: str
    candidate: str
    terms: str
    seed: int
    point: int
    epoch: int
    step: int
    samples: float
    seconds: float
    wire_bytes: float
    top1: float | None
    macro_f1: float | None
    loss: float | None


def names_of(row: type) -> list[str]:
    """Return the columns of a table of these rows."""
    return [f.name for f in fields(row)]


def rows_of(run: PlannedRun, folder: Path, status: str, message: str) -> tuple[RunRow, list[PointRow]]:
    """Read a run's folder. What is torn or missing is left out, and said in the row's message."""
    record = load_run(folder)
    summary, timing = summarise(record), measure(record)
    points = [_point(run, record, number, evaluation) for number, evaluation in enumerate(kept_evaluations(record))]
    torn = " ".join(record.notes)
    said = " ".join(part for part in (message, torn) if part)
    spent = _spent(record, None)
    values: dict[str, Any] = {
        **_outcome(summary, points),
        **_cost(summary, timing),
        **_staleness(record),
        "density": _density(record.windows),
        "train_s": spent[0],
        "wire_bytes": spent[1],
        "link": run.settings.get("launch.link"),
        **_placement(record),
    }
    return RunRow(run.name, run.candidate, run.terms, run.seed, status, said, **values), points


def _outcome(summary: Summary, points: list[PointRow]) -> dict[str, Any]:
    last = points[-1] if points else None
    return {
        "whole_s": summary.seconds,
        "startup_s": summary.startup_s,
        "steps": summary.steps,
        "epochs": summary.epochs,
        "workers": summary.workers or None,
        "parameters": summary.parameters,
        "eval_samples": summary.eval_samples or None,
        "top1": last.top1 if last else None,
        "best_top1": summary.best_top1,
        "macro_f1": last.macro_f1 if last else None,
        "eval_loss": last.loss if last else None,
        "nonfinite_step": summary.nonfinite_step,
        "restarts": summary.restarts,
    }


def _cost(summary: Summary, timing: Timing | None) -> dict[str, Any]:
    memory = timing.memory_bytes if timing else ()
    phases = {f"phase_{name}": seconds for name, seconds in summary.phases.items()}
    return {
        "wire_bytes_per_step": summary.wire_bytes_per_step,
        "samples_per_s": summary.samples_per_s,
        "step_s": summary.step_s,
        "exposed_s": timing.exposed_s if timing else None,
        **{name: phases.get(name) for name in names_of(RunRow) if name.startswith("phase_")},
        "memory_bytes": max(memory, default=None),
        "memory_bytes_by_rank": " ".join(f"{b:.0f}" for b in memory) or None,
    }


def _staleness(record: RunRecord) -> dict[str, Any]:
    """Add up the last histograms of all servers: how many updates a gradient's parameters were behind."""
    starts = record.of_kind("start")
    classes = starts[-1].details.get("classes") if starts else None
    latest = {str(m.details.get("name")): m.details.get("staleness") for m in record.of_kind("server")}
    counts: Counter[int] = Counter()
    for histogram in latest.values():
        if isinstance(histogram, dict):
            counts.update({int(k): int(v) for k, v in histogram.items() if str(k).isdigit()})
    total = sum(counts.values())
    return {
        "classes": len(classes) if isinstance(classes, list) else None,
        "staleness": " ".join(f"{k}:{n}" for k, n in sorted(counts.items())) or None,
        "staleness_mean": sum(k * n for k, n in counts.items()) / total if total else None,
    }


def _placement(record: RunRecord) -> dict[str, Any]:
    """Return threads and cores of the workers, as they told them when they began."""
    starts = record.of_kind("start")
    threads, cores = (starts[-1].details.get(key) for key in ("threads", "affinity")) if starts else (None, None)
    told = [*(cores if isinstance(cores, list) else []), *(m.details.get("affinity") for m in record.of_kind("worker"))]
    return {
        "threads": threads if isinstance(threads, int) else None,
        "affinity": "; ".join(sorted({str(c) for c in told if c})) or None,
    }


def _density(windows: Sequence[Window]) -> float | None:
    """Return the share of the encoded elements that rank 0 sent, the mean over the steps; None: no sparse codec."""
    told = [(w.steps, w.density) for w in windows if w.density is not None]
    steps = sum(n for n, _ in told)
    return sum(n * share for n, share in told) / steps if steps else None


def _point(run: PlannedRun, record: RunRecord, number: int, evaluation: Evaluation) -> PointRow:
    seconds, n_bytes, samples = _spent(record, evaluation)
    top1, loss = evaluation.metrics.get("top1"), evaluation.loss
    return PointRow(
        run.name, run.candidate, run.terms, run.seed, number, evaluation.epoch, evaluation.step, samples, seconds,
        n_bytes, _finite(top1), _finite(evaluation.metrics.get("macro_f1")), _finite(loss),
    )  # fmt: skip


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _spent(record: RunRecord, until: Evaluation | None) -> tuple[float, float, float]:
    """Add up (seconds, bytes, samples) of the steps up to an evaluation's; what a restart undid was spent as well.

    A window that reaches past the step counts by its share: asynchronous workers go on while one of them evaluates.
    """
    seconds = n_bytes = samples = 0.0
    for window in record.windows:
        share = _share(window, until)
        seconds += share * window.seconds
        n_bytes += share * window.wire_bytes
        samples += share * window.samples
    return seconds, n_bytes, samples


def _share(window: Window, until: Evaluation | None) -> float:
    if until is None or window.attempt < until.attempt:
        return 1.0
    if window.attempt > until.attempt:
        return 0.0
    past = max(0, window.step - until.step)
    return max(0.0, window.steps - past) / window.steps
