"""Candidates against the baseline, from the tables alone: speed-up, loss, intervals, verdict."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from echelon.study.base import COMPLETED, Study
from echelon.study.grid import is_excluded
from echelon.study.intervals import Interval, mean_interval, ratio_interval, reached_at
from echelon.study.metric import UNRECORDED, PrimaryMetric
from echelon.study.tables import PointRow, RunRow

SAME_SPEED = 1.05
NARROW = 1.25


class Verdict(StrEnum):
    """Verdict on a candidate; the values are the words of the page."""

    BASELINE = "baseline"
    BETTER = "better"
    FASTER_AT_A_LOSS = "faster at a loss"
    SLOWER_FOR_A_GAIN = "slower for a gain"
    NO_BENEFIT = "no benefit here"
    NO_DIFFERENCE = "no difference"
    NOT_CONVERGED = "did not converge"
    UNCERTAIN = "uncertain"
    TOO_FEW_SEEDS = "too few seeds"
    NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Comparison:
    """Comparison of a candidate with the baseline under the same terms.

    Attributes:
        seeds: seeds in which both it and the baseline completed: what the intervals are over.
        planned: seeds in which it was to be run.
        reached: in how many of `seeds` it reached the target.
        to_target: how many times as fast as the baseline to the target; None unless every seed of both reached it.
        to_end: the same to the end of the run. Both from the first step on, pauses counted.
        points: gain of the final primary metric over the baseline's, in `PrimaryMetric.unit`.
        noise_points: gain that the samples evaluated may show by chance, two standard deviations.
        reason: why it was not measured, or in what way it did not converge.
    """

    candidate: str
    terms: str
    verdict: Verdict
    seeds: int
    planned: int = 0
    reached: int = 0
    to_target: Interval | None = None
    to_end: Interval | None = None
    points: Interval | None = None
    noise_points: float = 0.0
    bytes_ratio: float | None = None
    reason: str = ""


@dataclass(frozen=True)
class ComparisonGroup:
    """Comparisons of all candidates under the same terms.

    Attributes:
        target: a value of the primary metric; None without a baseline.
        same_speed: ratios of times up to this are not told from chance: 1.05, or what candidates with the very
            settings of the baseline differed by.
        metric: what they are compared by.
    """

    terms: str
    target: float | None
    comparisons: tuple[Comparison, ...]
    same_speed: float = SAME_SPEED
    metric: PrimaryMetric = UNRECORDED


def set_targets(study: Study, runs: Sequence[RunRow], points: Sequence[PointRow]) -> list[RunRow]:
    """Fill in each run's target, and the seconds and bytes that it took to get there.

    The target lies `loss_points` below what the baseline reaches in every seed: below its worst final value.
    """
    by_run: dict[str, list[PointRow]] = {}
    for point in points:
        by_run.setdefault(point.run, []).append(point)
    filled = []
    for row in runs:
        target = target_of(study, [r for r in runs if r.terms == row.terms])
        if target is None or row.status != COMPLETED:
            filled.append(replace(row, target=target, target_s=None, target_bytes=None))
            continue
        score, reached = row.primary.score, [p for p in by_run.get(row.run, []) if p.value is not None]
        scores = [score(p.value) for p in reached if p.value is not None]
        seconds = reached_at([p.seconds for p in reached], scores, score(target))
        counted = row.wire_bytes is not None
        n_bytes = reached_at([p.wire_bytes for p in reached], scores, score(target)) if counted else None
        filled.append(replace(row, target=target, target_s=seconds, target_bytes=n_bytes))
    return filled


def target_of(study: Study, runs: Sequence[RunRow]) -> float | None:
    """Return the target of runs under the same terms; None when no run of the baseline completed."""
    metric = metric_of(runs)
    finals = [
        r.final for r in runs if r.candidate == study.baseline.label and r.status == COMPLETED and r.final is not None
    ]
    return metric.target(min(finals, key=metric.score), study.loss_points) if finals else None


def metric_of(runs: Sequence[RunRow]) -> PrimaryMetric:
    """Return the metric that runs of the same study are compared by: that of the first that completed."""
    return next((r.primary for r in runs if r.status == COMPLETED), UNRECORDED)


def compare(study: Study, runs: Sequence[RunRow]) -> list[ComparisonGroup]:
    """Compare every candidate with the baseline, under each of the terms. `runs` have their targets."""
    groups = []
    for terms in study.terms:
        mine = [r for r in runs if r.terms == terms.label]
        by_candidate = {c.label: [r for r in mine if r.candidate == c.label] for c in study.candidates}
        planned = [label for label, rows in by_candidate.items() if rows]
        if all(is_excluded(candidate, terms, study.exclude) for candidate in study.candidates):
            continue
        target = next((r.target for r in mine if r.target is not None), None)
        base = _done(by_candidate[study.baseline.label])
        compared = [_compare(study, label, by_candidate[label], base) for label in planned]
        again = repeats(study)
        same_speed = max([SAME_SPEED, *(_chance(c) for c in compared if c.candidate in again)])
        judged = (_judged(study, c, again, same_speed) for c in compared)
        named = (replace(c, terms=terms.label, planned=len(by_candidate[c.candidate])) for c in judged)
        groups.append(ComparisonGroup(terms.label, target, tuple(named), same_speed, metric_of(mine)))
    return groups


def repeats(study: Study) -> set[str]:
    """Return the candidates that have the very settings of the baseline: what they differ by is chance."""
    base = study.baseline
    return {c.label for c in study.candidates if c is not base and dict(c.settings) == dict(base.settings)}


def _chance(c: Comparison) -> float:
    """Return the ratio of times, at least 1, up to which a repetition of the baseline differed from it."""
    speeds = [s for s in (c.to_target, c.to_end) if s is not None]
    bounds = [b for s in speeds for b in (s.value, s.low, s.high) if b]
    return max([1.0, *(max(b, 1 / b) for b in bounds)])


def _judged(study: Study, c: Comparison, again: set[str], same_speed: float) -> Comparison:
    if c.verdict is not Verdict.UNCERTAIN:
        return c
    verdict = judge(c, study.loss_points, same_speed)
    known = verdict not in (Verdict.NOT_MEASURED, Verdict.TOO_FEW_SEEDS)
    return replace(c, verdict=Verdict.NO_DIFFERENCE if c.candidate in again and known else verdict)


def _compare(study: Study, label: str, rows: Sequence[RunRow], base: Mapping[int, RunRow]) -> Comparison:
    done = _done(rows)
    if label == study.baseline.label and done:
        return _baseline(label, done)
    if not done:
        return Comparison(label, "", Verdict.NOT_MEASURED, 0, reason=_why_not(rows))
    seeds = sorted(done.keys() & base.keys())
    if not seeds:
        return Comparison(
            label, "", Verdict.NOT_MEASURED, 0, reason="no run of the baseline completed: nothing to compare with"
        )
    pairs = [(base[s], done[s]) for s in seeds]
    measured = _measure(label, pairs)
    failures = [reason for b, c in pairs if (reason := not_converged(c, b.final))]
    if 2 * len(failures) > len(pairs):
        return replace(measured, verdict=Verdict.NOT_CONVERGED, reason=failures[0])
    return measured


def _baseline(label: str, done: Mapping[int, RunRow]) -> Comparison:
    rows = list(done.values())
    failures = [reason for r in rows if (reason := not_converged(r, None))]
    verdict = Verdict.NOT_CONVERGED if 2 * len(failures) > len(rows) else Verdict.BASELINE
    reached = sum(r.target_s is not None for r in rows)
    return Comparison(label, "", verdict, len(rows), reached=reached, reason=failures[0] if failures else "")


def _measure(label: str, pairs: Sequence[tuple[RunRow, RunRow]]) -> Comparison:
    targets = [(b.target_s, c.target_s) for b, c in pairs]
    both = [(b, c) for b, c in targets if b and c]
    ends = [(b.end_s, c.end_s) for b, c in pairs if b.end_s and c.end_s]
    finals = [b.primary.gain(c.final, b.final) for b, c in pairs if b.final is not None and c.final is not None]
    sent = [(b.wire_bytes, c.wire_bytes) for b, c in pairs if b.wire_bytes is not None and c.wire_bytes is not None]
    base_bytes = sum(b for b, _ in sent)
    return Comparison(
        candidate=label,
        terms="",
        verdict=Verdict.UNCERTAIN,
        seeds=len(pairs),
        reached=sum(c is not None for _, c in targets),
        to_target=_ratio(both) if len(both) == len(pairs) else None,
        to_end=_ratio(ends) if ends else None,
        points=mean_interval(finals) if finals else None,
        noise_points=_noise(pairs),
        bytes_ratio=sum(c for _, c in sent) / base_bytes if base_bytes else None,
    )


def _ratio(pairs: Sequence[tuple[float, float]]) -> Interval:
    return ratio_interval([b for b, _ in pairs], [c for _, c in pairs])


def not_converged(row: RunRow, baseline: float | None) -> str:
    """Return in what way a run did not converge, or nothing.

    The loss was not finite at the end, or the primary metric says so (`PrimaryMetric.failure`).
    """
    metric = row.primary
    if row.final is None or row.eval_loss is None:
        return "the loss is not finite" if row.eval_loss is None and row.steps else f"no {metric.label} was recorded"
    return metric.failure(row.final, baseline, row.eval_samples or 0)


def judge(c: Comparison, loss_points: float, same_speed: float = SAME_SPEED) -> Verdict:
    """Give the verdict on what was measured.

    Faster and slower: the whole interval says so, and by `same_speed` (a ratio) at least. A loss: the whole interval
    says so (or a seed does not reach the target), and by more than the study's `loss_points`; a gain has to exceed the
    noise of evaluation, too.
    """
    speed = c.to_target or c.to_end
    if speed is None or c.points is None:
        return Verdict.NOT_MEASURED
    if speed.low is None or speed.high is None or c.points.low is None or c.points.high is None:
        return Verdict.TOO_FEW_SEEDS
    faster = speed.low > 1 and speed.value >= same_speed
    slower = speed.high < 1 and speed.value <= 1 / same_speed
    short = c.reached < c.seeds
    loses = c.points.value < -loss_points and (c.points.high < 0 or short)
    gains = c.points.low > 0 and c.points.value > max(loss_points, c.noise_points)
    if loses or slower:
        if faster:
            return Verdict.FASTER_AT_A_LOSS
        return Verdict.SLOWER_FOR_A_GAIN if gains else Verdict.NO_BENEFIT
    if (faster or gains) and not short:
        return Verdict.BETTER
    alike = abs(c.points.value) <= max(loss_points, c.noise_points)
    return Verdict.NO_DIFFERENCE if alike and not short and _alike(speed, same_speed) else Verdict.UNCERTAIN


def _alike(speed: Interval, same_speed: float) -> bool:
    """Return whether a ratio of speeds is 1 within `same_speed`, or its narrow interval contains 1."""
    assert speed.low is not None and speed.high is not None
    undecided = speed.low <= 1 <= speed.high and speed.high / speed.low <= NARROW
    return 1 / same_speed < speed.value < same_speed or undecided


def _noise(pairs: Sequence[tuple[RunRow, RunRow]]) -> float:
    """Return two standard deviations of the mean gain that come from the samples evaluated alone; 0: not known."""
    variances = [
        r.primary.variance(r.final, r.eval_samples) for pair in pairs for r in pair if r.final and r.eval_samples
    ]
    return 200 * math.sqrt(sum(variances)) / len(pairs)


def _done(rows: Sequence[RunRow]) -> dict[int, RunRow]:
    return {r.seed: r for r in rows if r.status == COMPLETED and r.end_s}


def _why_not(rows: Sequence[RunRow]) -> str:
    reasons = list(dict.fromkeys(f"{r.status}: {r.message}" if r.message else r.status for r in rows))
    return "; ".join(reasons[:2]) or "it was not run"
