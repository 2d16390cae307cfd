"""Which candidate to take under each of the terms, why, and what would change the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from echelon.core.units import format_bytes
from echelon.run.resolve import rate_of
from echelon.study.base import COMPLETED, Study
from echelon.study.compare import Comparison, ComparisonGroup, Verdict
from echelon.study.intervals import FEWEST_SEEDS
from echelon.study.tables import RunRow

_FEWER_BYTES = 0.9
_MOST_RATES = 3


@dataclass(frozen=True)
class StepCost:
    """A candidate's mean step: seconds that no link changes, and bytes that one rank sends.

    Attributes:
        follows: over another link it would send more or less often.
    """

    fixed_s: float
    rank_bytes: float
    step_s: float
    exposed_s: float
    follows: bool = False


@dataclass(frozen=True)
class Recommendation:
    """What to take under these terms; None: nothing can be recommended. Sentences, plain text."""

    terms: str
    candidate: str | None
    says: str
    why: str
    changes: tuple[str, ...]


def recommend(study: Study, group: ComparisonGroup, runs: Sequence[RunRow]) -> Recommendation:
    """Recommend the candidate whose gain is surest, or the baseline where none brings anything."""
    base = study.baseline.label
    verdicts = {c.candidate: c for c in group.comparisons}
    mine = [r for r in runs if r.terms == group.terms]
    costs = {c.candidate: cost for c in group.comparisons if (cost := step_cost(mine, c.candidate))}
    if base not in verdicts or verdicts[base].verdict is not Verdict.BASELINE:
        how = verdicts[base].verdict if base in verdicts else Verdict.NOT_MEASURED
        return Recommendation(group.terms, None, f"Nothing is recommended: the baseline {base} {_was(how)}.", "", ())
    measured = [c for c in group.comparisons if c.candidate != base and c.verdict is not Verdict.NOT_MEASURED]
    if len(study.seeds) < FEWEST_SEEDS or (measured and all(c.verdict is Verdict.TOO_FEW_SEEDS for c in measured)):
        n = min(len(study.seeds), max((c.seeds for c in measured), default=0)) or len(study.seeds)
        few = "one seed" if n == 1 else f"{n} seeds"
        says = (
            f"Nothing is recommended: from {few} nothing can be concluded about {group.metric.label}, and the times "
            f"have no interval; {FEWEST_SEEDS} seeds or more give one."
        )
        return Recommendation(group.terms, None, says, "", _rates(base, costs))
    better = [c for c in group.comparisons if c.verdict is Verdict.BETTER]
    if not better:
        others = [c for c in group.comparisons if c.candidate != base]
        why = "no candidate is better" if others else "there is no other candidate"
        return Recommendation(
            group.terms, base, f"Stay with {base}: {why}.", "", _what_changes(group, base, base, costs)
        )
    best = max(better, key=_sureness)
    says = f"Take {best.candidate}."
    return Recommendation(
        group.terms, best.candidate, says, _why(best, base, costs), _what_changes(group, base, best.candidate, costs)
    )


def _was(verdict: Verdict) -> str:
    return "did not converge" if verdict is Verdict.NOT_CONVERGED else "was not measured"


def _sureness(c: Comparison) -> float:
    speed = c.to_target or c.to_end
    return (speed.low or 0.0) if speed else 0.0


def step_cost(runs: Sequence[RunRow], candidate: str) -> StepCost | None:
    """Split a candidate's mean step into what the link's rate changes and what it does not; None: not measured, as of
    layouts that send inside a replica.

    What a link of rate r takes for b bytes, 8 b / r, is exposed at most as far as communication was; without a
    shaped link nothing is attributed to the rate.
    """
    done = [r for r in runs if r.candidate == candidate and r.status == COMPLETED and r.step_s and r.workers]
    if not done or any(r.wire_bytes_per_step is None for r in done):
        return None
    step_s = fmean(r.step_s or 0.0 for r in done)
    exposed_s = fmean(r.exposed_s or 0.0 for r in done)
    rank_bytes = fmean((r.wire_bytes_per_step or 0.0) / (r.workers or 1) for r in done)
    link = done[0].link
    transfer_s = 8 * rank_bytes / rate_of(link) if link else 0.0
    follows = any(r.periods for r in done)
    return StepCost(step_s - min(exposed_s, transfer_s), rank_bytes, step_s, exposed_s, follows)


def break_even_bits_per_s(base: StepCost, other: StepCost) -> float | None:
    """Return the link rate below which a candidate's step is shorter: 8 (b0 - b1) / (f1 - f0) with f seconds that the
    link does not change and b bytes of a rank; infinity: at any rate; None: it does not send less.
    """
    if other.rank_bytes > _FEWER_BYTES * base.rank_bytes:
        return None
    extra_s = other.fixed_s - base.fixed_s
    return 8 * (base.rank_bytes - other.rank_bytes) / extra_s if extra_s > 0 else float("inf")


def _why(best: Comparison, base: str, costs: dict[str, StepCost]) -> str:
    if best.candidate not in costs or base not in costs:
        return ""
    now, then = costs[best.candidate], costs[base]
    clauses = []
    if now.rank_bytes < _FEWER_BYTES * then.rank_bytes:
        times = then.rank_bytes / max(now.rank_bytes, 1.0)
        sizes = f"{format_bytes(now.rank_bytes)} a step and rank, not {format_bytes(then.rank_bytes)}"
        clauses.append(f"it sends {times:.1f}x fewer bytes ({sizes})")
    if abs(now.step_s - then.step_s) > 0.05 * then.step_s:
        waits = f"of which {now.exposed_s * 1e3:.3g} ms wait for communication, not {then.exposed_s * 1e3:.3g} ms"
        clauses.append(f"a step takes {now.step_s * 1e3:.3g} ms, not {then.step_s * 1e3:.3g} ms, {waits}")
    return f"Why: {'; '.join(clauses)}." if clauses else ""


def _what_changes(group: ComparisonGroup, base: str, chosen: str, costs: dict[str, StepCost]) -> tuple[str, ...]:
    sentences = list(_rates(base, costs, chosen if chosen != base else None))
    losing = [c for c in group.comparisons if c.verdict is Verdict.FASTER_AT_A_LOSS and c.points and c.to_end]
    if losing:
        fastest = max(losing, key=lambda c: c.to_end.value if c.to_end else 0.0)
        assert fastest.points is not None and fastest.to_end is not None
        sentences.append(
            f"If a loss of {-fastest.points.value:.2f} {group.metric.unit} is acceptable, {fastest.candidate} is "
            f"{fastest.to_end.value:.2f}x as fast to the end."
        )
    if any(c.verdict is Verdict.UNCERTAIN for c in group.comparisons):
        names = [c.candidate for c in group.comparisons if c.verdict is Verdict.UNCERTAIN]
        sentences.append(f"More seeds would tell more about {_some(names)}.")
    return tuple(sentences)


def _some(names: Sequence[str]) -> str:
    return "; ".join(names[:_MOST_RATES]) + (
        f" and {len(names) - _MOST_RATES} more" if len(names) > _MOST_RATES else ""
    )


def _rates(base: str, costs: dict[str, StepCost], chosen: str | None = None) -> tuple[str, ...]:
    """Say at which link rates a step of another candidate would be shorter: an estimate, and named one.

    What follows the link sends more or less often at other rates: nothing is said of it.
    """
    costs = {name: cost for name, cost in costs.items() if not cost.follows}
    if base not in costs:
        return ()
    rates = {name: break_even_bits_per_s(costs[base], cost) for name, cost in costs.items() if name != base}
    known = sorted(((rate, name) for name, rate in rates.items() if rate), reverse=True)
    if chosen is not None:
        known = [(rate, name) for rate, name in known if name == chosen]
    said = []
    for rate, name in known[:_MOST_RATES]:
        where = "on a link of any rate" if rate == float("inf") else f"on links below about {_rate(rate)}"
        by = "By mean bytes and step times (an estimate without an interval)"
        said.append(f"{by}, a step of {name} is shorter than one of {base} {where}.")
    return tuple(said)


def _rate(bits_per_s: float) -> str:
    for unit, scale in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 1e3)):
        if bits_per_s >= scale:
            return (
                f"{bits_per_s / scale:.2g} {unit}" if bits_per_s < 100 * scale else f"{bits_per_s / scale:.0f} {unit}"
            )
    return f"{bits_per_s:.0f} bit/s"
