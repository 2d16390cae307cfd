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
from echelon.reporting.report.predictions import WayPrediction
from echelon.reporting.report.records import load_run
from echelon.run.resolve import canonical
from echelon.study.base import COMPLETED, Candidate, PlannedRun, Settings, Study
from echelon.study.folder import run_folder
from echelon.study.grid import planned_runs
from echelon.study.intervals import ratio_interval
from echelon.study.tables import RunRow

CLOSE = 0.15
"""A prediction holds when the gain that it names is within this share of the measured one."""
_SPECS = ("strategy.sync", "strategy.compression")


@dataclass(frozen=True)
class PredictionCheck:
    """A candidate's gain over the baseline, as predicted and as measured: geometric means over the seeds.

    Attributes:
        whole: whether the gain is in seconds of whole runs, from the first step to the end, or (in tables from before
            these were predicted) in those of a step.
    """

    candidate: str
    terms: str
    predicted: float
    measured: float
    seeds: int
    whole: bool = True

    @property
    def off(self) -> float:
        """Relative error of the predicted gain."""
        return self.predicted / self.measured - 1

    @property
    def holds(self) -> bool:
        """Whether the error is within 15%."""
        return abs(self.off) <= CLOSE


@dataclass(frozen=True)
class NotPredicted:
    """A candidate whose gain the baseline's record does not tell, and why."""

    candidate: str
    terms: str
    reason: str


def set_predictions(path: Path, study: Study, runs: Sequence[RunRow]) -> list[RunRow]:
    """Fill in the seconds per step and run that the baseline's record of the same seed and terms predicted.

    A row keeps what it has where the baseline's folder is gone.
    """
    planned = {run.name: run for run in planned_runs(study)}
    predicted: dict[tuple[str, int], tuple[PlannedRun, Sequence[WayPrediction]]] = {}
    for row in runs:
        folder = run_folder(path, row.run)
        if row.candidate == study.baseline.label and row.status == COMPLETED and folder.is_dir():
            predicted[row.terms, row.seed] = planned[row.run], summarise(load_run(folder)).predictions
    filled = []
    for row in runs:
        base = predicted.get((row.terms, row.seed))
        if base is not None and row.run in planned:
            found = _prediction(planned[row.run].settings, *base)
            if found is not None:
                row = replace(row, predicted_step_s=found.then_s, predicted_run_s=found.run_then_s or None)
        filled.append(row)
    return filled


def _prediction(settings: Settings, base: PlannedRun, predictions: Sequence[WayPrediction]) -> WayPrediction | None:
    wanted = _plain(settings)
    if wanted == _plain(base.settings):
        return None
    return next((p for p in predictions if _plain({**base.settings, **p.settings}) == wanted), None)


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
    done = [r for r in runs if r.status == COMPLETED]
    base = {(r.terms, r.seed): r for r in done if r.candidate == study.baseline.label}
    checked = []
    for terms in study.terms:
        for candidate in study.candidates:
            rows = [r for r in done if (r.candidate, r.terms) == (candidate.label, terms.label)]
            pairs = [(base[r.terms, r.seed], r) for r in rows if (r.terms, r.seed) in base]
            whole = [(b.run_s, r.predicted_run_s, r.run_s) for b, r in pairs]
            steps = [(b.step_s, r.predicted_step_s, r.step_s) for b, r in pairs]
            gains = _gains(whole) or _gains(steps)
            if gains:
                checked.append(PredictionCheck(candidate.label, terms.label, *gains, whole=bool(_gains(whole))))
    return checked


def not_predicted(study: Study, runs: Sequence[RunRow]) -> list[NotPredicted]:
    """Return the measured candidates without a predicted gain, under terms where one could be expected."""
    checked = {(c.candidate, c.terms) for c in check_predictions(study, runs)}
    done = {(r.candidate, r.terms) for r in runs if r.status == COMPLETED}
    base, found = study.baseline, []
    for terms in (t.label for t in study.terms if (study.baseline.label, t.label) in done):
        others = {
            c.label: changed for c in study.candidates if (c.label, terms) in done and (changed := _changed(base, c))
        }
        if any((name, terms) in checked or changed <= set(_SPECS) for name, changed in others.items()):
            missing = {name: changed for name, changed in others.items() if (name, terms) not in checked}
            found += [NotPredicted(name, terms, _why_not(changed)) for name, changed in missing.items()]
    return found


def _changed(base: Candidate, other: Candidate) -> set[str]:
    """Return the settings in which a candidate differs from the baseline; none: it repeats it."""
    now, then = _plain(base.settings), _plain(other.settings)
    return {name for name in {*now, *then} if now.get(name) != then.get(name)}


def _why_not(changed: set[str]) -> str:
    if beyond := sorted(name.rpartition(".")[2] for name in changed - set(_SPECS)):
        return f"a record says nothing of another {' and '.join(beyond)}"
    return "a record holds the costs of a few ways to communicate, and of no other"


def _gains(rows: Sequence[tuple[float | None, float | None, float | None]]) -> tuple[float, float, int] | None:
    """Return gains as predicted and as measured of (now, predicted, measured) seconds, and of how many rows."""
    known = [(now, then, measured) for now, then, measured in rows if now and then and measured]
    if not known:
        return None
    now_s, then_s, measured_s = zip(*known, strict=True)
    return ratio_interval(now_s, then_s).value, ratio_interval(now_s, measured_s).value, len(known)


def prediction_words(checked: Sequence[PredictionCheck], others: Sequence[NotPredicted] = ()) -> list[str]:
    """Say how many predictions under one set of terms held, each with what was measured, and whose gain has none."""
    return _checked_words(checked) + unpredicted_words(others)


def unpredicted_words(others: Sequence[NotPredicted]) -> list[str]:
    """Name the candidates whose gain has no prediction, a sentence for each reason."""
    words = []
    for reason in dict.fromkeys(other.reason for other in others):
        names = ", ".join(other.candidate for other in others if other.reason == reason)
        words.append(f"Without a predicted gain: {names} ({reason}).")
    return words


def _checked_words(checked: Sequence[PredictionCheck]) -> list[str]:
    if not checked:
        return []
    gains = ", ".join(f"{c.candidate} {c.predicted:.2f}x (measured {c.measured:.2f}x)" for c in checked)
    n = sum(c.holds for c in checked)
    return [
        f"{gain_of(checked)}, predicted from the baseline's record alone: {gains}. "
        f"{n} of {len(checked)} within {CLOSE:.0%} of what was measured."
    ]


def gain_of(checked: Sequence[PredictionCheck]) -> str:
    """Say what the gains are in."""
    return "Gains of whole runs" if all(c.whole for c in checked) else "Gains in the rate of steps"
