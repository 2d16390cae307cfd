"""The study in sentences: for the terminal, the page and `summary.json`. Every number in them is in the tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import fmean

from echelon.core.units import format_seconds, sentence_case
from echelon.reporting.report.words import pause_name
from echelon.study.base import COMPLETED, Study
from echelon.study.compare import SAME_SPEED, Comparison, ComparisonGroup, Verdict, metric_of
from echelon.study.intervals import FEWEST_SEEDS, Interval, coverage_of
from echelon.study.metric import PrimaryMetric
from echelon.study.predictions import check_predictions, not_predicted, prediction_words
from echelon.study.recommend import Recommendation
from echelon.study.tables import PAUSE_REASONS, RunRow

_LEAST_PAUSE = 0.001
_EQUAL = (
    ("link", "link", ("launch.link",)),
    ("threads of each worker", "threads", ("launch.threads", "launch.workers", "strategy.parallel")),
    ("cores it may use", "affinity", ("launch.workers", "launch.nodes")),
)
"""What runs under the same terms must have alike, its column, and the settings with which a candidate chooses it."""


def study_words(
    study: Study, groups: Sequence[ComparisonGroup], recommended: Sequence[Recommendation], runs: Sequence[RunRow]
) -> list[str]:
    """Return all sentences, the most important first. Plain text, unescaped."""
    words = opening_words(study, recommended, runs)
    checked, unpredicted = check_predictions(study, runs), not_predicted(study, runs)
    for group in groups:
        words += [_under(group.terms, text) for text in group_words(study, group)]
        words += [_under(group.terms, text) for text in whole_run_words(group, runs)]
        mine = [c for c in checked if c.terms == group.terms]
        others = [n for n in unpredicted if n.terms == group.terms]
        words += [_under(group.terms, text) for text in prediction_words(mine, others)]
    return words + caveats(study, runs)


def opening_words(study: Study, recommended: Sequence[Recommendation], runs: Sequence[RunRow]) -> list[str]:
    """Say what was run, what is recommended under each of the terms, why, and what would change that."""
    words = [_outcome(study, runs)]
    for recommendation in recommended:
        text = " ".join(clause for clause in (recommendation.says, recommendation.why) if clause)
        words.append(_under(recommendation.terms, text))
        words += [_under(recommendation.terms, change) for change in recommendation.changes]
    return words


def group_words(study: Study, group: ComparisonGroup) -> list[str]:
    """Return a sentence on each candidate under the same terms, and what the target is."""
    metric, base = group.metric, study.baseline.label
    others = [c for c in group.comparisons if c.verdict is not Verdict.BASELINE]
    words = [f"{c.candidate}: {sentence(c, metric)}" for c in others]
    if group.target is not None:
        side = "below" if metric.direction == "max" else "above"
        loss = f"{study.loss_points:g} {metric.unit} {side} the worst final {metric.label}"
        words.append(f"The target is {metric.text(group.target)}: {loss} of {base}.")
    if group.same_speed > SAME_SPEED:
        words.append(
            f"{study.baseline.label} twice differed by up to {group.same_speed:.2f}x in time: what differs by less is "
            "not told from chance."
        )
    return words


def whole_run_words(group: ComparisonGroup, runs: Sequence[RunRow]) -> list[str]:
    """Say how long each candidate's runs took from the first step to the end, and which share of that pauses have."""
    clauses = []
    for c in group.comparisons:
        rows = [
            r for r in runs if (r.candidate, r.terms, r.status) == (c.candidate, group.terms, COMPLETED) and r.run_s
        ]
        if rows:
            shares = pause_shares(rows)
            text = format_seconds(fmean(r.run_s or 0.0 for r in rows))
            clauses.append(f"{c.candidate} {text}" + (f" ({shares})" if shares else ""))
    return [f"Whole runs, from the first step to the end, and the share of pauses: {'; '.join(clauses)}."] * bool(
        clauses
    )


def pause_shares(rows: Sequence[RunRow]) -> str:
    """Name the pauses of runs, each with its share of their time from the first step to the end, the greatest first."""
    whole_s = sum(r.run_s or 0.0 for r in rows)
    if not whole_s:
        return ""
    shares = {name: sum(r.pauses.get(name, 0.0) for r in rows) / whole_s for name in PAUSE_REASONS}
    worth = sorted(((share, name) for name, share in shares.items() if share >= _LEAST_PAUSE), reverse=True)
    return ", ".join(f"{pause_name(name)} {share:.1%}" for share, name in worth)


def sentence(c: Comparison, metric: PrimaryMetric) -> str:
    """Say the verdict on one candidate with its numbers, without its name."""
    if c.verdict is Verdict.BASELINE:
        return "the baseline: the others are compared with it."
    if c.verdict is Verdict.NOT_MEASURED:
        return f"not measured ({c.reason.rstrip('.')})."
    if c.verdict is Verdict.NOT_CONVERGED:
        return f"did not converge: {c.reason.rstrip('.')}."
    speed = _speed(c)
    points = metric.gain_text(c.points) if c.points else f"its {metric.label} is not known"
    if 0 < c.seeds < c.planned:
        points += f", in {c.seeds} of {c.planned} seeds"
    if c.verdict is Verdict.TOO_FEW_SEEDS:
        return f"{speed}; {points}."  # how few they are, and what follows from that, is said of the whole study
    if c.verdict is Verdict.FASTER_AT_A_LOSS and c.points is not None:
        return f"faster at a loss of {-c.points.value:.2f} {metric.unit}: {speed}; {points}."
    return f"{c.verdict}: {speed}; {points}."


def _speed(c: Comparison) -> str:
    if c.to_target is not None:
        return f"{_times(c.to_target)} to the target"
    if c.to_end is None:
        return "its time is not known"
    short = f"reaches the target in {c.reached} of {c.seeds} seed{'s' * (c.seeds > 1)}"
    return f"{short}, {_times(c.to_end)} to the end"


def _times(speed: Interval) -> str:
    """Say how many times as fast, or as long, it takes: whichever makes the number greater than 1."""
    slower = speed.value < 1
    value, low, high = (1 / v if slower and v else v for v in (speed.value, speed.low, speed.high))
    if slower:
        low, high = high, low
    bounds = f" ({low:.2f}x to {high:.2f}x)" if low is not None and high is not None else ""
    return f"{value:.2f}x{bounds} as {'long' if slower else 'fast'}"


def _outcome(study: Study, runs: Sequence[RunRow]) -> str:
    n = Counter(r.status for r in runs)
    others = ", ".join(f"{count} {status}" for status, count in sorted(n.items()) if status != COMPLETED)
    terms = f", {len(study.terms)} sets of terms" if len(study.terms) > 1 else ""
    what = f"{len(study.candidates)} candidates, {len(study.seeds)} seed{'s' * (len(study.seeds) > 1)}{terms}"
    return f"{n[COMPLETED]} of {len(runs)} runs completed ({what}){f'; {others}' if others else ''}."


def _under(terms: str, text: str) -> str:
    return f"[{terms}] {text}" if terms else text


def _equality(study: Study, terms: str, runs: Sequence[RunRow]) -> list[str]:
    """Say whether the runs had the same link, threads and cores; what candidates choose themselves is left out."""
    done = [r for r in runs if r.terms == terms and r.status == COMPLETED]
    chosen = {name for candidate in study.candidates for name in candidate.settings}
    same, differing = [], []
    for what, column, settings in _EQUAL:
        counts = Counter(getattr(r, column) for r in done)
        if chosen & set(settings) or None in counts or not counts:
            continue
        values = [f"{value} in {n}" for value, n in sorted(counts.items(), key=str)]
        if len(counts) > 1:
            differing.append(f"{what} differed: {', '.join(values)} of the runs")
        else:
            same.append(f"{what}: {next(iter(counts))}")
    words = [f"Not on equal terms: {'; '.join(differing)}."] if differing else []
    return words + ([f"The same for all runs: {', '.join(same)}."] if same else [])


def caveats(study: Study, runs: Sequence[RunRow]) -> list[str]:
    """Say how far the figures are to be trusted."""
    n, words, metric = len(study.seeds), [], metric_of(runs)
    if FEWEST_SEEDS <= n < 6:
        words.append(
            f"Intervals are bootstrapped over {n} seeds: over so few they hold the truth in about "
            f"{coverage_of(n):.0%} of studies, not in 95%."
        )
    samples = min((r.eval_samples for r in runs if r.eval_samples), default=0)
    if samples and samples < 2000 and metric.percent:
        words.append(
            f"{sentence_case(metric.label)} is measured on {samples} samples: "
            f"one of them is {100 / samples:.2f} points."
        )
    words += [_under(terms.label, text) for terms in study.terms for text in _equality(study, terms.label, runs)]
    restarted = sum(1 for r in runs if r.restarts)
    if restarted:
        words.append(f"{restarted} runs lost a worker and were restarted: their seconds leave the outage out.")
    return words
