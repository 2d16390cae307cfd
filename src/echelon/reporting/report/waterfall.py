"""Where a run's wall time went, rank by rank: its start, the phases of its steps, the pauses between them, its end.

The parts are measured by different clocks (phases and pauses by each rank's own, the rest from the moments in the
record), so that their sum is a check: it is the wall time within 2%, or the report says that it is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from echelon.observe.phases import PAUSES, PHASES, Phase
from echelon.records.kinds import Checkpoint, Evaluation, Pause, Start, Steps
from echelon.reporting.report.clock import Sitting, sittings
from echelon.reporting.report.records import RunRecord
from echelon.reporting.report.whole_run import before_steps, last_writing, rank_seconds

START, RESTART, PREPARING, END, MISSING = "start", "restart", "preparing", "end", "not accounted for"
TOLERANCE = 0.02
_SAVED = "checkpoint"
_EVALUATED = "evaluation"


@dataclass(frozen=True)
class Waterfall:
    """Seconds by part, one column for each rank of the last attempt; parts are in the order of a run.

    Attributes:
        parts: names and seconds by rank; the last one is what no part accounts for (negative: counted twice).
        wall_s: of the whole run, pauses between a stop and a resume left out.
    """

    parts: dict[str, tuple[float, ...]]
    wall_s: float

    @property
    def ranks(self) -> int:
        """How many ranks there are."""
        return len(self.parts[START])

    @property
    def missing(self) -> float:
        """The largest share of the wall time, over the ranks, that the parts miss or count twice."""
        return max(abs(s) for s in self.parts[MISSING]) / self.wall_s if self.wall_s else 0.0


def waterfall_of(record: RunRecord) -> Waterfall | None:
    """Add up a run's time; None where it has no steps or no start."""
    stretches = sittings(record)
    wall_s = sum(s.seconds for s in stretches)
    if not record.windows or not record.windows[-1].phases or not record.of(Start) or wall_s <= 0:
        return None
    n = len(record.windows[-1].phases)
    windows = [w for w in record.windows if len(w.phases) == n]
    moments = sorted(w.t for w in record.windows) + [e.t for e in record.of(Evaluation)]
    moments += [p.t for p in record.of(Pause)]
    if any(w.pauses for w in windows):
        moments += [c.t for c in record.of(Checkpoint)]
    parts = {START: (_starting(record, stretches),) * n, RESTART: (_restarting(record, stretches, moments),) * n}
    parts[PREPARING] = (before_steps(record),) * n
    parts |= _phases(windows, n)
    for name, seconds in _phases_of_others(record, n).items():  # steps of other numbers of ranks: each took the mean
        parts[name] = tuple(own + seconds for own in parts.get(name, (0.0,) * n))
    if record.has_servers:
        idle_s = [sum(rank_seconds(w, r) - sum(w.phases[r]) for w in windows) for r in range(n)]
        other = parts.get(Phase.OTHER, (0.0,) * n)  # a worker may have no batch, which is no phase of one
        parts[Phase.OTHER.value] = tuple(s + max(0.0, idle) for s, idle in zip(other, idle_s, strict=True))
    for name, column in _pauses(record, windows, n).items():
        parts[name] = tuple(a + b for a, b in zip(parts.get(name, (0.0,) * n), column, strict=True))
    parts[END] = (sum(_ending(s, moments) for s in stretches),) * n
    parts[MISSING] = tuple(wall_s - sum(column) for column in zip(*parts.values(), strict=True))
    return Waterfall(
        {name: seconds for name, seconds in parts.items() if any(seconds) or name in (START, MISSING)}, wall_s
    )


def waterfall_notes(waterfall: Waterfall | None) -> list[str]:
    """Say so where the parts are not the whole."""
    if waterfall is None or waterfall.missing <= TOLERANCE:
        return []
    shares = [s / waterfall.wall_s for s in waterfall.parts[MISSING]]
    rank = max(range(len(shares)), key=lambda r: abs(shares[r]))
    what = "no phase and no pause accounts for" if shares[rank] > 0 else "phases and pauses count twice"
    return [f"On rank {rank}, {what} {abs(shares[rank]):.0%} of the run's wall time."]


def _starting(record: RunRecord, stretches: Sequence[Sitting]) -> float:
    """From each command to the first start after it."""
    starts = [start.t for start in record.of(Start)]
    found = 0.0
    for stretch in stretches:
        first = next((t for t in starts if stretch.begin <= t <= stretch.end), stretch.begin)
        found += first - stretch.begin
    return found


def _restarting(record: RunRecord, stretches: Sequence[Sitting], moments: Sequence[float]) -> float:
    """From the last sign of an attempt to the start of the next one, where a group was started again."""
    found = 0.0
    for stretch in stretches:
        starts = [start.t for start in record.of(Start) if stretch.begin <= start.t <= stretch.end]
        for before, after in pairwise(starts):
            found += after - max([t for t in moments if before <= t <= after], default=before)
    return found


def _ending(stretch: Sitting, moments: Sequence[float]) -> float:
    """From the last step, or the evaluation or checkpoint after it, to the end."""
    last = max([t for t in moments if stretch.begin <= t <= stretch.end], default=stretch.begin)
    return max(0.0, stretch.begin + stretch.seconds - last)


def _phases(windows: Sequence[Steps], n: int) -> dict[str, tuple[float, ...]]:
    names = list(dict.fromkeys(name for w in windows for name in w.phase_names))
    known = [str(p) for p in PHASES if str(p) in names]
    return {
        name: tuple(
            sum(w.phases[r][w.phase_names.index(name)] for w in windows if name in w.phase_names) for r in range(n)
        )
        for name in known + [name for name in names if name not in known]
    }


def _phases_of_others(record: RunRecord, n: int) -> dict[str, float]:
    """Return the mean seconds a rank spent in each phase and pause, in windows of another number of ranks than `n`."""
    found: dict[str, float] = {}
    for window in record.windows:
        for names, rows in ((window.phase_names, window.phases), (window.pause_names, window.pauses)):
            for name, column in zip(names, zip(*rows, strict=True), strict=False) if len(rows) not in (0, n) else ():
                found[name] = found.get(name, 0.0) + sum(column) / len(rows)
    return found


def _pauses(record: RunRecord, windows: Sequence[Steps], n: int) -> dict[str, tuple[float, ...]]:
    """Pauses that ranks told with their windows; what came after an attempt's last one, rank 0 alone recorded."""
    if not any(w.pauses for w in windows):
        evaluated = sum(e.seconds for e in record.of(Evaluation))
        saved = sum(c.blocked_s for c in record.of(Checkpoint))
        return {_EVALUATED: (evaluated,) * n, _SAVED: (saved,) * n}
    sums = {name: [0.0] * n for name in PAUSES}
    for window in windows:
        for r, row in enumerate(window.pauses):
            for name, seconds in zip(window.pause_names, row, strict=True):
                if name in sums:
                    sums[name][r] += seconds
    starts = [start.t for start in record.of(Start)] + [float("inf")]
    for begin, end in pairwise(starts):
        last = max((w.t for w in record.windows if begin <= w.t < end), default=begin)
        for pause in record.of(Pause):
            if last <= pause.t < end:
                column = sums.setdefault(pause.name, [0.0] * n)
                column[:] = [seconds + min(pause.seconds, pause.t - last) for seconds in column]
    sums[_SAVED] = [seconds + last_writing(record) for seconds in sums[_SAVED]]
    return {name: tuple(column) for name, column in sums.items()}
