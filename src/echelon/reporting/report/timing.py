"""Where the time of a step went, measured from the windows after warm-up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from echelon.observe.phases import Phase, phase_share
from echelon.records.kinds import Steps
from echelon.records.segments import RECORD_FILE
from echelon.reporting.report.communication import Communication, communication_of
from echelon.reporting.report.records import RunRecord

_ENOUGH_WINDOWS = 3
_OUTLIER = 2.0
SIGNIFICANT = 0.01


@dataclass(frozen=True)
class SlowRank:
    """The rank with the most work of its own, against the median of the others.

    `saving_s` is what a step would be shorter if it were as fast as the next slowest;
    `persistence` the share of windows in which it was the slowest; `host` is empty where it is not known.
    `chance` is how likely as much comes from ranks that are alike (`_chance`), over `tested` windows.
    """

    rank: int
    ratio: float
    phase: str
    wait_s: float
    saving_s: float
    persistence: float
    host: str = ""
    chance: float = 1.0
    tested: int = 0

    @property
    def is_slow(self) -> bool:
        """Whether that it works longer is more than chance."""
        return self.chance < SIGNIFICANT

    @property
    def evidence(self) -> str:
        """A sentence on what was tested."""
        chance = f"p = {self.chance:.2g}" if self.chance >= 1e-4 else "p < 0.0001"
        times = round(self.persistence * self.tested)
        return f"Tested: it was the slowest in {times} of {self.tested} windows of steps (sign test, {chance})."


@dataclass(frozen=True)
class Timing:
    """Means per step over the windows measured; seconds unless the name says otherwise.

    Attributes:
        gc_s: by rank; empty where not recorded.
    """

    steps: int
    windows: int
    skipped_windows: int
    step_s: float
    samples_per_s: float
    wire_bytes_per_step: float
    phases: dict[str, float]
    by_rank: tuple[dict[str, float], ...]
    exposed_s: float
    slow: SlowRank | None
    outlier_windows: int
    memory_bytes: tuple[float, ...]
    communication: Communication | None = None
    gc_s: tuple[float, ...] = ()

    def share(self, phase: str) -> float:
        """A phase's share of a step, mean over ranks."""
        return phase_share(self.phases.get(phase, 0.0), self.step_s)


def measure(record: RunRecord) -> Timing | None:
    """Measure the steps after warm-up: without each attempt's first window, where enough remain.

    Only windows with as many ranks as the last one count. None when there was no step.
    """
    if not record.windows:
        return None
    n_ranks = len(record.windows[-1].phases)
    same_world = [[w for w in attempt.windows if len(w.phases) == n_ranks] for attempt in record.attempts]
    windows = [w for attempt in same_world for w in (attempt[1:] if _windows(attempt) >= _ENOUGH_WINDOWS else attempt)]
    steps = sum(w.count for w in windows)
    seconds = sum(w.seconds for w in windows)
    by_rank = tuple(_rank_means(windows, rank, steps) for rank in range(n_ranks))
    per_step = [seconds for w in windows for seconds in w.step_times()]
    slow_s = _OUTLIER * median(per_step)
    return Timing(
        steps=steps,
        windows=_windows(windows),
        skipped_windows=sum(map(_windows, same_world)) - _windows(windows),
        step_s=seconds / steps,
        samples_per_s=sum(w.samples for w in windows) / seconds if seconds else 0.0,
        wire_bytes_per_step=sum(w.wire_bytes for w in windows) / steps,
        phases=_mean_over_ranks(by_rank),
        by_rank=by_rank,
        exposed_s=min((r.get(Phase.COMMUNICATE, 0.0) for r in by_rank), default=0.0),
        slow=_slow_rank(by_rank, windows),
        outlier_windows=sum(s > slow_s for s in per_step),
        memory_bytes=_peak_memory(record.windows, n_ranks),
        communication=communication_of(windows, n_ranks),
        gc_s=_by_rank([w.gc_s for w in windows], steps),
    )


def _windows(lines: Sequence[Steps]) -> int:
    return sum(line.windows for line in lines)


def _by_rank(rows: Sequence[Sequence[float]], steps: int) -> tuple[float, ...]:
    """Means per step of what is recorded once for each rank and window."""
    if not rows or not all(rows):
        return ()
    return tuple(sum(column) / steps for column in zip(*rows, strict=True))


def _rank_means(windows: list[Steps], rank: int, steps: int) -> dict[str, float]:
    sums: dict[str, float] = {}
    for window in windows:
        for name, seconds in zip(window.phase_names, window.phases[rank], strict=True):
            sums[name] = sums.get(name, 0.0) + seconds
    return {name: seconds / steps for name, seconds in sums.items()}


def _mean_over_ranks(by_rank: Sequence[dict[str, float]]) -> dict[str, float]:
    names = list(dict.fromkeys(name for rank in by_rank for name in rank))
    return {name: sum(rank.get(name, 0.0) for rank in by_rank) / len(by_rank) for name in names}


def own_work(phases: dict[str, float]) -> float:
    """Seconds a rank spends on its own work: all but communication, in which it also waits for others."""
    return sum(seconds for name, seconds in phases.items() if name != Phase.COMMUNICATE)


def _slow_rank(by_rank: Sequence[dict[str, float]], windows: list[Steps]) -> SlowRank | None:
    if len(by_rank) < 2:
        return None
    work = [own_work(r) for r in by_rank]
    slow = max(range(len(work)), key=work.__getitem__)
    others = [r for i, r in enumerate(by_rank) if i != slow]
    typical = median(own_work(r) for r in others)
    excess = {n: by_rank[slow][n] - median(r.get(n, 0.0) for r in others) for n in by_rank[slow]}
    excess.pop(Phase.COMMUNICATE, None)
    waits = [r.get(Phase.COMMUNICATE, 0.0) for r in others]
    slowest, tested = sum(w.slowest_ranks()[slow] for w in windows), _windows(windows)
    wait_s = max(0.0, sum(waits) / len(waits) - by_rank[slow].get(Phase.COMMUNICATE, 0.0))
    return SlowRank(
        rank=slow,
        ratio=work[slow] / typical if typical else 1.0,
        phase=max(excess, key=excess.__getitem__) if excess else "",
        wait_s=wait_s,
        saving_s=min(wait_s, work[slow] - max(own_work(r) for r in others)),
        persistence=slowest / tested,
        chance=_chance(slowest, tested, len(work)),
        tested=tested,
    )


def _chance(slowest: int, windows: int, ranks: int) -> float:
    """Return how likely one of several equal ranks is the slowest in so many windows, or in more.

    A sign test: a given rank is the slowest of a window with chance 1 / ranks; times the number of ranks, for the one
    that was it most was chosen (Bonferroni). Windows last seconds: what disturbs a core for one is one observation.
    """
    log_one, log_other = -math.log(ranks), math.log1p(-1 / ranks)
    ways = (
        math.lgamma(windows + 1) - math.lgamma(k + 1) - math.lgamma(windows - k + 1)
        + k * log_one + (windows - k) * log_other
        for k in range(slowest, windows + 1)
    )  # fmt: skip
    return min(1.0, ranks * math.fsum(map(math.exp, ways)))


def _peak_memory(windows: Sequence[Steps], n_ranks: int) -> tuple[float, ...]:
    rows = [w.memory_bytes for w in windows if len(w.memory_bytes) == n_ranks]
    return tuple(max(column) for column in zip(*rows, strict=True))


def timing_notes(timing: Timing | None) -> list[str]:
    """Say where the measurement is weak: few steps."""
    if timing is None:
        return []
    notes = []
    if timing.steps < 50 or timing.windows < _ENOUGH_WINDOWS:
        notes.append(
            f"Evidence is thin: {timing.steps} step{'s' * (timing.steps != 1)} in {timing.windows} "
            f"window{'s' * (timing.windows != 1)} of {RECORD_FILE} carry the figures on time."
        )
    return notes
