"""What the baseline's record predicted for a candidate's steps, beside what the candidate then measured.

A run records at its end what other ways to communicate would cost it, and its report predicts a step's seconds from
that (`echelon.reporting.report.predictions`). A study holds the baseline and the candidates, so it checks them: what a
seed's baseline predicted stands in the table beside the same seed's measured step, and numbers come from there alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from echelon.config.build import leaves
from echelon.core.errors import UserError
from echelon.reporting.report import summarise
from echelon.reporting.report.predictions import Prediction
from echelon.reporting.report.records import load_run
from echelon.run.resolve import canonical
from echelon.study.base import COMPLETED, PlannedRun, Settings, Study
from echelon.study.folder import run_folder
from echelon.study.grid import planned_runs
from echelon.study.intervals import ratio_interval
from echelon.study.tables import RunRow

CLOSE = 0.15
"""A prediction holds when the gain that it names is within this share of the measured one."""
_SPECS = ("strategy.sync", "strategy.compression")


@dataclass(frozen=True)
class PredictionCheck:
    """A candidate's gain over the baseline in the rate of steps, as predicted and as measured: means over the seeds."""

    candidate: str
    terms: str
    predicted: float
    measured: float
    seeds: int

    @property
    def off(self) -> float:
        """Relative error of the predicted gain."""
        return self.predicted / self.measured - 1

    @property
    def holds(self) -> bool:
        """Whether the error is within 15%."""
        return abs(self.off) <= CLOSE


def set_predictions(path: Path, study: Study, runs: Sequence[RunRow]) -> list[RunRow]:
    """Fill in the seconds per step that the baseline's record of the same seed and terms predicted.

    A row keeps what it has where the baseline's folder is gone.
    """
    planned = {run.name: run for run in planned_runs(study)}
    predicted: dict[tuple[str, int], tuple[PlannedRun, Sequence[Prediction]]] = {}
    for row in runs:
        folder = run_folder(path, row.run)
        if row.candidate == study.baseline.label and row.status == COMPLETED and folder.is_dir():
            predicted[row.terms, row.seed] = planned[row.run], summarise(load_run(folder)).predictions
    filled = []
    for row in runs:
        base = predicted.get((row.terms, row.seed))
        if base is not None and row.run in planned:
            row = replace(row, predicted_step_s=_predicted_s(planned[row.run].settings, *base))
        filled.append(row)
    return filled


def _predicted_s(settings: Settings, base: PlannedRun, predictions: Sequence[Prediction]) -> float | None:
    wanted = _plain(settings)
    if wanted == _plain(base.settings):
        return None
    return next((p.then_s for p in predictions if _plain({**base.settings, **p.settings}) == wanted), None)


def _plain(settings: Mapping[str, str]) -> dict[str, str]:
    """Settings with the strategy's defaults filled in and its specs read: `topk(0.01)` is `topk(density=0.01)`."""
    defaults = {name: str(item.default) for name, item, _ in leaves() if name in _SPECS}
    plain = {**defaults, **settings}
    for name in _SPECS:
        try:
            plain[name] = canonical(name, plain[name])
        except UserError:  # no spec: its run was refused, and compares as it was written
            continue
    return plain


def check_predictions(study: Study, runs: Sequence[RunRow]) -> list[PredictionCheck]:
    """Compare predicted and measured gains, candidate by candidate under each of the terms that predict any."""
    base = {(r.terms, r.seed): r.step_s for r in runs if r.candidate == study.baseline.label and r.status == COMPLETED}
    checked = []
    for terms in study.terms:
        for candidate in study.candidates:
            rows = [r for r in runs if (r.candidate, r.terms, r.status) == (candidate.label, terms.label, COMPLETED)]
            predicted = [
                (now_s, r.predicted_step_s, r.step_s)
                for r in rows
                if (now_s := base.get((r.terms, r.seed))) and r.predicted_step_s and r.step_s
            ]
            if predicted:
                now, then, measured = zip(*predicted, strict=True)
                gains = ratio_interval(now, then).value, ratio_interval(now, measured).value
                checked.append(PredictionCheck(candidate.label, terms.label, *gains, len(predicted)))
    return checked


def prediction_words(checked: Sequence[PredictionCheck]) -> list[str]:
    """Say how many of the predictions under one set of terms held, and each with what was measured."""
    if not checked:
        return []
    gains = ", ".join(f"{c.candidate} {c.predicted:.2f}x (measured {c.measured:.2f}x)" for c in checked)
    n = sum(c.holds for c in checked)
    return [
        f"Gains in the rate of steps, predicted from the baseline's record alone: {gains}. "
        f"{n} of {len(checked)} within {CLOSE:.0%} of what was measured."
    ]
