"""What communication takes in all, how much of it computing hides, and how much of the waiting is for slower ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from echelon.records.kinds import Steps, Waits


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
            this rank, by rank; empty where no rank waits for another.
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
    same_world = [w for w in windows if len(w.phases) == n_ranks]
    by_window = [(w, waits) for w in same_world if (waits := w.waits_by_window()) is not None]
    steps = sum(w.count for w, _ in by_window)
    if n_ranks < 2 or not steps:
        return None
    mean_s = sum(waits.total_s for _, waits in by_window) / n_ranks / steps
    by_step = [waits for w, _ in by_window if (waits := w.waits_by_step()) is not None]
    every_step = len(by_step) == len(by_window)
    waits = Waits.sum(by_step if every_step else [waits for _, waits in by_window])
    exposed_s = waits.least_s / steps
    timed = any(s for w, _ in by_window for s in w.comm_busy_s)
    hidden_s = sum(w.hidden_s for w, _ in by_window)
    spread_s = sum(sum(w.comm_spread_s) for w, _ in by_window) / n_ranks / steps
    return Communication(
        exposed_s, hidden_s / n_ranks / steps if timed else 0.0, spread_s, max(0.0, mean_s - exposed_s), timed,
        tuple(count / waits.count for count in waits.critical), every_step,
    )  # fmt: skip
