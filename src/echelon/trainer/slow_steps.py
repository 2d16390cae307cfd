"""Steps that took far longer than the others, recorded as they happen with what tells their cause."""

from __future__ import annotations

from echelon.observe.phases import PHASE_NAMES
from echelon.records.file import Recorder
from echelon.records.kinds import SlowStep
from echelon.trainer.step_watch import StepWatch
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
        """Look at a window that was just closed; `watch` is that of rank 0."""
        slowest, median_s = closed.slowest[0], watch.median_s
        if slowest is None or watch.seen < LEAST_SEEN:
            return
        if slowest.seconds < max(TIMES_MEDIAN * median_s, median_s + LEAST_OVER_S):
            return
        if self._count >= MOST_RECORDED and slowest.seconds <= self._longest_s:
            return
        self._count, self._longest_s = self._count + 1, max(slowest.seconds, self._longest_s)
        same = [slow if slow and slow.place == slowest.place else None for slow in closed.slowest]
        self._record.write(
            SlowStep(
                step=closed.steps.step - closed.steps.count + 1 + slowest.place,
                seconds=slowest.seconds,
                median_s=median_s,
                phase_names=PHASE_NAMES,
                phases=[slow.phases if slow else None for slow in same],
                gc_s=[slow.gc_s if slow else None for slow in same],
                after=closed.pauses[slowest.place],
            )
        )
