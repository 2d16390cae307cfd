"""A run's course as rows: one for each evaluation, and for each epoch without one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from echelon.records.kinds import Evaluation, Steps
from echelon.reporting.report.records import RunRecord


@dataclass(frozen=True)
class HistoryRow:
    """What was trained since the row before, and the evaluation after it.

    Attributes:
        epoch: from 1.
        step: the last one, from 1.
        train_loss: mean over the steps.
        eval_loss: None where nothing was evaluated.
        metrics: of the evaluation.
        seconds: of steps, pauses between them left out.
        wire_bytes: that all ranks sent so that replicas agree.
    """

    epoch: int
    step: int
    train_loss: float | None
    eval_loss: float | None
    metrics: Mapping[str, float | None]
    seconds: float
    samples: float
    wire_bytes: float

    @property
    def samples_per_s(self) -> float | None:
        """Samples trained on per second of steps."""
        return self.samples / self.seconds if self.seconds > 0 else None


def history_of(record: RunRecord) -> list[HistoryRow]:
    """Return the rows of a run; what a restart undid is left out."""
    windows, evaluations = record.kept_windows(), {e.step: e for e in record.kept_evaluations()}
    evaluated = {e.epoch for e in evaluations.values()}
    ends = {w.epoch: w.step for w in windows if w.epoch not in evaluated}
    rows, before = [], 0
    for step in sorted({*evaluations, *ends.values()}):
        rows.append(_row(windows, before, step, evaluations.get(step)))
        before = step
    return rows


def _row(windows: Sequence[Steps], before: int, step: int, evaluation: Evaluation | None) -> HistoryRow:
    """Add up the windows after a step and up to another; one that reaches past either counts by its share."""
    shares = [(w, _share(w, before, step)) for w in windows if before < w.step and w.step - w.count < step]
    steps = sum(w.count * share for w, share in shares)
    return HistoryRow(
        epoch=1 + (evaluation.epoch if evaluation else shares[-1][0].epoch),
        step=step,
        train_loss=sum(w.mean_loss * w.count * share for w, share in shares) / steps if steps else None,
        eval_loss=evaluation.loss if evaluation else None,
        metrics=evaluation.metrics if evaluation else {},
        seconds=sum(w.seconds * share for w, share in shares),
        samples=sum(w.samples * share for w, share in shares),
        wire_bytes=sum(w.wire_bytes * share for w, share in shares),
    )


def _share(window: Steps, before: int, step: int) -> float:
    first = window.step - window.count
    return (min(step, window.step) - max(before, first)) / window.count
