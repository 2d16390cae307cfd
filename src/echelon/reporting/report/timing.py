"""Where the time of a step went, measured from the windows after warm-up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

from echelon.core.units import format_seconds
from echelon.observe.phases import Phase, phase_share
from echelon.records.kinds import Steps
from echelon.records.segments import RECORD_FILE
from echelon.reporting.report.communication import Communication, communication_of
from echelon.reporting.report.records import RunRecord
from echelon.reporting.report.whole_run import rank_seconds

_ENOUGH_WINDOWS, _ENOUGH_S = 3, 1.0
_OUTLIER = 2.0
SIGNIFICANT = 0.01
LEAST_RATIO = 1.2  # equal ranks on busy cores differ by a tenth or more for as long as a scheduler leaves them there
LEAST_S = 20.0
INDEPENDENT_S = 5.0  # what disturbs a core lasts for seconds: windows that are closer are one observation
FAR_RATIO = 2.5  # another process on its core makes a rank twice as slow: who is slower than that has another reason
FAR_S = 1.0  # and so much time between windows makes them two observations


@dataclass(frozen=True)
class SlowRank:
    """The rank with the most work of its own, against the median of the others.

    `saving_s` is what a step would be shorter if it were as fast as the next slowest; `persistence` the share of the
    `tested` windows in which it was the slowest, over `measured_s`; `host` is empty where it is not known. `chance` is
    how likely as much comes from ranks that are alike (`chance_of_slowest`), over so many `observations`.
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
    observations: int = 0
    measured_s: float = 0.0

    @property
    def is_slow(self) -> bool:
        """Whether it works much longer than the others, for long enough, and for more than chance."""
        least_s = LEAST_S if self.ratio < FAR_RATIO else LEAST_S / 2
        return self.ratio >= LEAST_RATIO and self.measured_s >= least_s and self.chance < SIGNIFICANT

    @property
    def evidence(self) -> str:
        """A sentence on what was tested."""
        chance = f"p = {self.chance:.2g}" if self.chance >= 1e-4 else "p < 0.0001"
        times, between = round(self.persistence * self.tested), between_s(self.ratio)
        return (
            f"Tested: it was the slowest in {times} of {self.tested} windows of steps, counted as {self.observations} "
            f"observations of {between:g} s or more (sign test, {chance}), and works at least {LEAST_RATIO:g}x "
            "as long."
        )


@dataclass(frozen=True)
class WaitedFor:
    """Whether one rank is the one that the others wait for, more than by chance.

    Attributes:
        share: of steps (or windows) in which they waited for the one that they waited for most.
        observations: that they count as, over `measured_s`.
    """

    share: float
    ranks: int
    observations: int
    measured_s: float

    @property
    def chance(self) -> float:
        """How likely as much comes from ranks that are alike."""
        return chance_of_slowest(int(self.share * self.observations), self.observations, self.ranks)

    @property
    def is_one(self) -> bool:
        """Whether it is, measured for long enough."""
        return self.measured_s >= LEAST_S and self.chance < SIGNIFICANT

    @property
    def sentence(self) -> str:
        """What was tested, and what came out."""
        if self.measured_s < LEAST_S:
            return (
                "Which rank the others wait for cannot be told from so little: "
                f"{format_seconds(self.measured_s)} of steps were measured, and it takes {LEAST_S:g} s."
            )
        said = "One rank is the one that the others wait for" if self.is_one else "No rank is the one to wait for"
        return (
            f"{said}: the one that was it most often was so in {self.share:.0%}, counted as {self.observations} "
            f"observations of {INDEPENDENT_S:g} s or more (sign test, p = {self.chance:.2g})."
        )


@dataclass(frozen=True)
class Timing:
    """Means per step over the windows measured; seconds unless the name says otherwise.

    Attributes:
        wire_bytes_per_step: over all steps, those of warm-up too: what a page says of bytes adds up.
        gc_s: by rank; empty where not recorded.
        waited_for: None where no rank waits for another.
        least_update_s: of all windows and ranks, the shortest update.
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
    waited_for: WaitedFor | None = None
    least_update_s: float = 0.0

    def share(self, phase: str) -> float:
        """A phase's share of a step, mean over ranks; of all phases at most 1.

        Windows last as long as on the first rank; in few steps the mean of all ranks' phases may be more.
        """
        return phase_share(self.phases.get(phase, 0.0), max(self.step_s, sum(self.phases.values())))


def measure(record: RunRecord) -> Timing | None:
    """Measure the steps after warm-up: without each attempt's first window, where enough remain.

    Only windows with as many ranks as the last one count. None when there was no step.
    """
    if not record.windows:
        return None
    n_ranks = len(record.windows[-1].phases)
    same_world = [[w for w in attempt.windows if len(w.phases) == n_ranks] for attempt in record.attempts]
    windows = [w for attempt in same_world for w in (attempt[1:] if _windows(attempt) >= _ENOUGH_WINDOWS else attempt)]
    every = [w for attempt in same_world for w in attempt]
    steps = sum(w.count for w in windows)
    seconds = sum(w.seconds for w in windows)
    by_rank = tuple(_rank_means(windows, rank, steps) for rank in range(n_ranks))
    if record.has_servers:
        own_s = [sum(rank_seconds(w, rank) for w in windows) / steps for rank in range(n_ranks)]
        by_rank = tuple(_filling(*each, step_s=seconds / steps) for each in zip(by_rank, own_s, strict=True))
    communication = communication_of(windows, n_ranks)
    if communication is not None and not record.waits_for_all:
        communication = replace(communication, waited_s=0.0, critical=())
    per_step = [seconds for w in windows for seconds in w.step_times()]
    slow_s = _OUTLIER * median(per_step)
    return Timing(
        steps=steps,
        windows=_windows(windows),
        skipped_windows=sum(map(_windows, same_world)) - _windows(windows),
        step_s=seconds / steps,
        samples_per_s=sum(w.samples for w in windows) / seconds if seconds else 0.0,
        wire_bytes_per_step=sum(w.wire_bytes for w in every) / sum(w.count for w in every),
        phases=_mean_over_ranks(by_rank),
        by_rank=by_rank,
        exposed_s=min((r.get(Phase.COMMUNICATE, 0.0) for r in by_rank), default=0.0),
        slow=_slow_rank(by_rank, windows) if record.waits_for_all else None,
        outlier_windows=sum(s > slow_s for s in per_step),
        memory_bytes=_peak_memory(record.windows, n_ranks),
        communication=communication,
        gc_s=_by_rank([w.gc_s for w in windows], steps),
        waited_for=_waited_for(communication, _windows(windows), seconds),
        least_update_s=min(
            (_rank_means([w], rank, w.count).get(Phase.UPDATE, 0.0) for w in windows for rank in range(n_ranks)),
            default=0.0,
        ),
    )


def _waited_for(communication: Communication | None, windows: int, seconds: float) -> WaitedFor | None:
    if communication is None or not communication.critical:
        return None
    shares = communication.critical
    return WaitedFor(max(shares), len(shares), independent(windows, seconds), seconds)


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


def _filling(phases: dict[str, float], own_s: float, step_s: float) -> dict[str, float]:
    """Return a worker's phases per step of the run, as its own time of steps was divided among them.

    Workers of servers pause one at a time, and their batches end at other moments than windows do: what they say of a
    few windows may be more than these last. Where it is less, the worker had no batch.
    """
    idle_s = max(0.0, own_s - sum(phases.values()))
    filled = {**phases, Phase.OTHER.value: phases.get(Phase.OTHER, 0.0) + idle_s}
    whole_s = sum(filled.values())
    return {name: seconds * step_s / whole_s for name, seconds in filled.items()} if whole_s else phases


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
    measured_s = sum(w.seconds for w in windows)
    ratio = work[slow] / typical if typical else 1.0
    observations = independent(tested, measured_s, ratio)
    wait_s = max(0.0, sum(waits) / len(waits) - by_rank[slow].get(Phase.COMMUNICATE, 0.0))
    return SlowRank(
        rank=slow,
        ratio=ratio,
        phase=max(excess, key=excess.__getitem__) if excess else "",
        wait_s=wait_s,
        saving_s=min(wait_s, work[slow] - max(own_work(r) for r in others)),
        persistence=slowest / tested,
        chance=chance_of_slowest(slowest * observations // tested, observations, len(work)),
        tested=tested,
        observations=observations,
        measured_s=measured_s,
    )


def between_s(ratio: float) -> float:
    """Return the seconds that make windows two observations of a rank that works so many times as long as others."""
    return INDEPENDENT_S if ratio < FAR_RATIO else FAR_S


def independent(windows: int, seconds: float, ratio: float = 1.0) -> int:
    """Return how many observations windows count as, that took so long together.

    >>> independent(6, 12.0), independent(50, 100.0), independent(3, 90.0), independent(15, 28.0, ratio=4.6)
    (2, 20, 3, 15)
    """
    return min(windows, int(seconds / between_s(ratio)))


def chance_of_slowest(slowest: int, observations: int, ranks: int) -> float:
    """Return how likely one of several equal ranks is the slowest in so many observations, or in more.

    A sign test: a given rank is the slowest of one with chance 1 / ranks; times the number of ranks, for the one that
    was it most was chosen (Bonferroni).

    >>> f"{chance_of_slowest(8, 8, ranks=2):.2g}", f"{chance_of_slowest(7, 8, ranks=2):.2g}"
    ('0.0078', '0.07')
    """
    log_one, log_other = -math.log(ranks), math.log1p(-1 / ranks)
    ways = (
        math.lgamma(observations + 1) - math.lgamma(k + 1) - math.lgamma(observations - k + 1)
        + k * log_one + (observations - k) * log_other
        for k in range(slowest, observations + 1)
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
    seconds = timing.steps * timing.step_s
    if timing.steps < 50 or timing.windows < _ENOUGH_WINDOWS or seconds < _ENOUGH_S:
        notes.append(
            f"These timings are rough: they come from {timing.steps} step{'s' * (timing.steps != 1)}, "
            f"{format_seconds(seconds)} in all, measured in {timing.windows} "
            f"part{'s' * (timing.windows != 1)} (`steps` lines of {RECORD_FILE})."
        )
    return notes
