"""What this rank's steps were like, one by one: how long each took, in which phase, how long it waited for others."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from echelon.collectives.times import ReduceTimes
from echelon.observe.garbage import GarbageClock
from echelon.observe.phases import PAUSES, PHASES, RECORDING, Phase, PhaseClock

_REMEMBERED = 256
_WAIT = PHASES.index(Phase.COMMUNICATE)


@dataclass(frozen=True)
class SlowestStep:
    """The longest step of a rank's window: its place there from 0, seconds by phase and in garbage collection."""

    place: int
    phases: list[float]
    gc_s: float

    @property
    def seconds(self) -> float:
        """How long it took."""
        return sum(self.phases)


@dataclass(frozen=True)
class RankFacts:
    """What one rank tells of a window.

    Attributes:
        gc_s: in garbage collections.
        busy_s: in which communication was under way during backward, hidden or not; see `ReduceTimes`.
        spread_s: in which it could be hidden.
        pauses: seconds of each of `PAUSES` since the window before.
        slowest: None where there was no step.
    """

    gc_s: float
    busy_s: float
    spread_s: float
    pauses: list[float]
    slowest: SlowestStep | None

    COLUMNS = 5 + len(PAUSES) + len(PHASES)

    def row(self) -> list[float]:
        """As numbers, to be gathered over the ranks."""
        slow = self.slowest
        place, gc_s, phases = (slow.place + 1, slow.gc_s, slow.phases) if slow else (0, 0.0, [0.0] * len(PHASES))
        return [self.gc_s, self.busy_s, self.spread_s, place, gc_s, *self.pauses, *phases]

    @staticmethod
    def of(row: Sequence[float]) -> RankFacts:
        """Undo `row`."""
        gc_s, busy_s, spread_s, place, slow_gc_s, *rest = row
        pauses, phases = rest[: len(PAUSES)], rest[len(PAUSES) :]
        slowest = SlowestStep(round(place) - 1, phases, slow_gc_s) if place else None
        return RankFacts(gc_s, busy_s, spread_s, pauses, slowest)


class StepWatch:
    """Follows a rank's steps through a window; pauses of the clock are in none of them.

    Steps of a GPU are known once its clock was drained: see `settle`.

    Attributes:
        waits: seconds that each step of the window waited for other ranks.
        pauses: what happened before each step of the window since the one before: evaluation, checkpoint.
    """

    def __init__(self, clock: PhaseClock, garbage: GarbageClock) -> None:
        self._clock, self._garbage = clock, garbage
        self._before = [0.0] * len(PHASES)
        self._gc_before = self._gc_at_step = garbage.seconds
        self._busy_before = self._spread_before = 0.0
        self._paused: list[str] = []
        self._paused_s = dict.fromkeys(PAUSES, 0.0)
        self._recent: deque[float] = deque(maxlen=_REMEMBERED)
        self._begin()

    def _begin(self) -> None:
        self._slowest: SlowestStep | None = None
        self._slowest_s = 0.0
        self.waits: list[float] = []
        self._gc_by_step: list[float] = []  # of steps that are not known yet
        self.pauses: list[list[str]] = []

    def paused(self, name: str, seconds: float) -> None:
        """Note what came before the next step, one of `PAUSES`, and how long it was."""
        if name != RECORDING:
            self._paused.append(name)
        self._paused_s[name] += seconds
        self._gc_at_step = self._garbage.seconds  # collections in a pause are no step's

    def take_over(self) -> None:
        """Note a step that was made before the ranks changed: how long it took is not known."""
        self.pauses.append([])
        self.waits.append(0.0)

    def end_step(self) -> None:
        """Note that a step is over."""
        now = self._clock.so_far()
        self.pauses.append(self._paused)
        self._paused = []
        gc_s, self._gc_at_step = self._garbage.seconds - self._gc_at_step, self._garbage.seconds
        if now is None:
            self._clock.end_step()
            self._gc_by_step.append(gc_s)
            return
        self._take([a - b for a, b in zip(now, self._before, strict=True)], gc_s)
        self._before = now

    def settle(self) -> None:
        """Take the steps that only a drained clock can tell of."""
        for phases, gc_s in zip(self._clock.take_steps(), self._gc_by_step, strict=True):
            self._take(phases, gc_s)
        self._gc_by_step = []

    def _take(self, phases: list[float], gc_s: float) -> None:
        seconds = sum(phases)
        if self._slowest is None or seconds > self._slowest_s:
            self._slowest, self._slowest_s = SlowestStep(len(self.waits), phases, gc_s), seconds
        self.waits.append(phases[_WAIT])
        self._recent.append(seconds)

    @property
    def median_s(self) -> float:
        """The median of the latest steps."""
        return median(self._recent) if self._recent else 0.0

    @property
    def seen(self) -> int:
        """Of how many steps."""
        return len(self._recent)

    def close(self, drained: Sequence[float], times: ReduceTimes | None) -> RankFacts:
        """Return what there is to tell of the window, and begin anew.

        Args:
            drained: what the clock gave when it was drained just now.
            times: of the strategy.
        """
        self.settle()
        busy, spread = (times.busy_s, times.spread_s) if times else (self._busy_before, self._spread_before)
        facts = RankFacts(
            self._garbage.seconds - self._gc_before, busy - self._busy_before, spread - self._spread_before,
            list(self._paused_s.values()), self._slowest,
        )  # fmt: skip
        self._paused_s = dict.fromkeys(PAUSES, 0.0)
        self._gc_before, self._busy_before, self._spread_before = self._garbage.seconds, busy, spread
        self._before = [before - s for before, s in zip(self._before, drained, strict=True)]
        self._begin()
        return facts
