"""Steps that took far longer than the others, recorded as they happen with what tells their cause."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from echelon.observe.phases import PHASE_NAMES
from echelon.records.file import Recorder
from echelon.records.kinds import SlowStep, Steps
from echelon.trainer.step_watch import SlowestStep, StepWatch
from echelon.trainer.window import ClosedWindow

TIMES_MEDIAN = 3.0
LEAST_OVER_S = 0.02
LEAST_SEEN = 10
MOST_RECORDED = 50


class SlowSteps:
    """Records a window's longest step where it took over 3 times the median of the latest ones and 20 ms more.

    A window is about two seconds; of several slow steps in one, the longest is recorded. After 50 of them only one that
    is longer than any before is recorded.
    """

    def __init__(self, record: Recorder) -> None:
        self._record = record
        self._count, self._longest_s = 0, 0.0

    def look(self, closed: ClosedWindow, watch: StepWatch) -> None:
        """Look at a window of all ranks that was just closed; `watch` is that of rank 0."""
        slowest = closed.slowest[0]
        if slowest is not None and self._is_slow(slowest, watch):
            same = [slow if slow and slow.place == slowest.place else None for slow in closed.slowest]
            step = closed.steps.step - closed.steps.count + 1 + slowest.place
            self._tell(step, same, closed.pauses[slowest.place], watch, closed.steps)

    def look_alone(self, step: int, rank: int, slowest: SlowestStep | None, after: list[str], watch: StepWatch) -> None:
        """Look at a step that was just done by one rank, which steps by itself; `after`: what came before it."""
        if slowest is not None and self._is_slow(slowest, watch):
            self._tell(step, [*[None] * rank, slowest], after, watch)

    def _is_slow(self, slowest: SlowestStep, watch: StepWatch) -> bool:
        median_s = watch.median_s
        if watch.seen < LEAST_SEEN or slowest.seconds < max(TIMES_MEDIAN * median_s, median_s + LEAST_OVER_S):
            return False
        if self._count >= MOST_RECORDED and slowest.seconds <= self._longest_s:
            return False
        self._count, self._longest_s = self._count + 1, max(slowest.seconds, self._longest_s)
        return True

    def _tell(
        self,
        step: int,
        ranks: Sequence[SlowestStep | None],
        after: list[str],
        watch: StepWatch,
        window: Steps | None = None,
    ) -> None:
        slow = SlowStep(
            step=step,
            seconds=next(slow.seconds for slow in ranks if slow),
            median_s=watch.median_s,
            phase_names=PHASE_NAMES,
            phases=[slow.phases if slow else None for slow in ranks],
            gc_s=[slow.gc_s if slow else None for slow in ranks],
            after=after,
        )
        waited_for = slow.critical_rank(window) if window is not None else None
        self._record.write(replace(slow, waited_for=waited_for))
