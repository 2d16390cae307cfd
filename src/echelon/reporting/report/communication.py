"""What communication takes in all, how much of it computing hides, and how much of the waiting is for slower ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from echelon.observe.phases import Phase
from echelon.records.kinds import Steps


@dataclass(frozen=True)
class Communication:
    """Seconds per step. A rank that hands its gradients over before the others waits for them: that is no network time.

    Attributes:
        exposed_s: what the step waits for when all ranks are there: of each step, the least that any rank waits.
        hidden_s: under way while backward still computes.
        spread_s: from the first bucket to the last: what could be hidden at most.
        waited_s: for slower ranks, the mean over the ranks.
        timed: whether what is hidden was timed; it is not on a GPU, nor where replicas agree outside of backward.
        critical: share of steps (of windows, where steps were not recorded one by one) in which the others waited for
            this rank, by rank.
        by_step: whether that is of steps.
    """

    exposed_s: float
    hidden_s: float
    spread_s: float
    waited_s: float
    timed: bool
    critical: tuple[float, ...]
    by_step: bool

    @property
    def total_s(self) -> float:
        """Hidden and exposed."""
        return self.exposed_s + self.hidden_s


def communication_of(windows: Sequence[Steps], n_ranks: int) -> Communication | None:
    """Measure communication over windows of the same ranks; None with a single one."""
    told = [w for w in windows if len(w.phases) == n_ranks and Phase.COMMUNICATE in w.phase_names]
    steps = sum(w.count for w in told)
    if n_ranks < 2 or not steps:
        return None
    waits = [_communicate(w) for w in told]
    mean_s = sum(sum(row) for row in waits) / n_ranks / steps
    by_step = all(len(w.waits) == n_ranks for w in told)
    if by_step:
        columns = [column for w in told for column in zip(*w.waits, strict=True)]
    else:
        columns = [tuple(row) for row in waits]
    exposed_s = sum(min(column) for column in columns) / steps
    timed = any(s for w in told for s in w.comm_busy_s)
    hidden_s = sum(max(0.0, sum(w.comm_busy_s) - sum(row)) for w, row in zip(told, waits, strict=True))
    spread_s = sum(sum(w.comm_spread_s) for w in told) / n_ranks / steps
    return Communication(
        exposed_s, hidden_s / n_ranks / steps if timed else 0.0, spread_s, max(0.0, mean_s - exposed_s), timed,
        _critical(columns, n_ranks), by_step,
    )  # fmt: skip


def _communicate(window: Steps) -> list[float]:
    column = window.phase_names.index(Phase.COMMUNICATE)
    return [rank[column] for rank in window.phases]


def _critical(columns: Sequence[Sequence[float]], n_ranks: int) -> tuple[float, ...]:
    counts = [0] * n_ranks
    for column in columns:
        counts[min(range(n_ranks), key=column.__getitem__)] += 1
    return tuple(count / len(columns) for count in counts)
