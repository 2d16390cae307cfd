"""Steps that took far longer than the others, recorded as they happen with what tells their cause."""

from __future__ import annotations

from echelon.observe.phases import PHASES
from echelon.records.file import Recorder
from echelon.records.kinds import SlowStep
from echelon.trainer.step_watch import RankFacts, StepWatch

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

    def look(self, first_step: int, ranks: list[RankFacts], watch: StepWatch, pauses: list[list[str]]) -> None:
        """Look at a window that was just closed.

        Args:
            first_step: number of its first step, from 1.
            ranks: what each rank told.
            watch: of rank 0.
            pauses: before each step of the window.
        """
        own = ranks[0].slowest
        typical = watch.median_s
        if own is None or watch.seen < LEAST_SEEN or own.seconds < max(TIMES_MEDIAN * typical, typical + LEAST_OVER_S):
            return
        if self._count >= MOST_RECORDED and own.seconds <= self._longest_s:
            return
        self._count, self._longest_s = self._count + 1, max(own.seconds, self._longest_s)
        same = [r.slowest if r.slowest and r.slowest.place == own.place else None for r in ranks]
        self._record.write(
            SlowStep(
                step=first_step + own.place,
                seconds=own.seconds,
                median_s=typical,
                phase_names=[p.value for p in PHASES],
                phases=[slow.phases if slow else None for slow in same],
                gc_s=[slow.gc_s if slow else None for slow in same],
                after=pauses[own.place],
            )
        )
