"""Who is best after the same time: candidates trained for the epochs that end in it, schedules stretched to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from echelon.core.units import format_seconds
from echelon.study.base import BASELINE_TIME, COMPLETED, Stage, Study
from echelon.study.compare import metric_of
from echelon.study.grid import run_places
from echelon.study.intervals import Interval, mean_interval
from echelon.study.metric import PrimaryMetric
from echelon.study.stages import epochs_of
from echelon.study.tables import RunRow

_LATE = 1.05


@dataclass(frozen=True)
class EqualTimeResult:
    """What a candidate has reached in equal time; values are means over the seeds, None where no run completed.

    Attributes:
        epochs: that end in the time.
        value: of the primary metric at the end.
        points: gain over the baseline's, paired by seed, in `PrimaryMetric.unit`.
        run_s: what its runs took, from the first step to the end.
    """

    candidate: str
    epochs: int
    value: float | None = None
    points: Interval | None = None
    run_s: float | None = None


@dataclass(frozen=True)
class TimeGroup:
    """Candidates under the same terms after `seconds`, the best first."""

    terms: str
    seconds: float
    step_statuses: tuple[EqualTimeResult, ...]
    metric: PrimaryMetric


def compare_in_time(study: Study, rows: Sequence[RunRow]) -> list[TimeGroup]:
    """Compare candidates after equal time, under each of the terms for which that is known.

    Where as many epochs end in the time as the study has, its run of these counts, and none is run again.
    """
    groups = []
    for terms in study.terms:
        seconds = study.choices.seconds.get(terms.label)
        if not study.equal_time or seconds is None:
            continue
        mine = [r for r in rows if r.terms == terms.label and r.status == COMPLETED and r.final is not None]
        metric, epochs = metric_of(mine), study.choices.epochs.get(terms.label, {})
        planned = {
            place.candidate.label: epochs_of(place.settings(study))
            for place in run_places(study)
            if place.terms == terms and place.candidate.label in epochs
        }
        ends = {label: _ends(mine, label, n, planned.get(label)) for label, n in epochs.items()}
        base = ends.get(study.baseline.label, {})
        step_statuses = [_result(label, n, ends[label], base, metric) for label, n in epochs.items()]
        known = sorted((s for s in step_statuses if s.value is not None), key=lambda s: -metric.score(s.value or 0.0))
        left = [s for s in step_statuses if s.value is None]
        groups.append(TimeGroup(terms.label, seconds, (*known, *left), metric))
    return groups


def _ends(rows: Sequence[RunRow], label: str, epochs: int, planned: int | None) -> dict[int, RunRow]:
    """Return a candidate's runs of so many epochs by seed; any may have stopped early.

    Args:
        planned: epochs of its runs of the study itself.
    """
    stage = Stage.EPOCHS if epochs == planned else Stage.TIME
    return {r.seed: r for r in rows if epochs and (r.candidate, r.stage) == (label, stage)}


def _result(
    label: str, epochs: int, ends: dict[int, RunRow], base: dict[int, RunRow], metric: PrimaryMetric
) -> EqualTimeResult:
    if not ends:
        return EqualTimeResult(label, epochs)
    pairs = [(ends[seed].final, base[seed].final) for seed in sorted(ends.keys() & base.keys())]
    gains = [metric.gain(mine, its) for mine, its in pairs if mine is not None and its is not None]
    return EqualTimeResult(
        label, epochs, fmean(r.final or 0.0 for r in ends.values()),
        mean_interval(gains) if gains and ends is not base else None, fmean(r.run_s or 0.0 for r in ends.values()),
    )  # fmt: skip


def time_words(study: Study, groups: Sequence[TimeGroup]) -> list[str]:
    """Say who is best after equal time, and what each candidate reached in it."""
    words = []
    for group in groups:
        whose = f", what {study.baseline.label} takes" if study.equal_time == BASELINE_TIME else ""
        clauses = "; ".join(_clause(s, group) for s in group.step_statuses)
        text = (
            f"After {format_seconds(group.seconds)} from the first step{whose}, each with its learning-rate schedule "
            f"stretched to the epochs that end by then, the best first: {clauses}."
        )
        words.append(f"[{group.terms}] {text}" if group.terms else text)
    return words


def _clause(s: EqualTimeResult, group: TimeGroup) -> str:
    if not s.epochs:
        return f"{s.candidate} ends no epoch in it"
    if s.value is None or s.run_s is None:
        return f"{s.candidate} is not known (no run of {s.epochs} epochs completed)"
    late = f", which is {s.run_s / group.seconds - 1:.0%} late" if s.run_s > _LATE * group.seconds else ""
    gain = f", {group.metric.gain_text(s.points)}" if s.points else ""
    end = f"{s.epochs} epochs, ended at {format_seconds(s.run_s)}{late}"
    return f"{s.candidate} {group.metric.text(s.value)} ({end}{gain})"
