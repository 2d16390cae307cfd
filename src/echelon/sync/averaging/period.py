"""The controller of `period=auto`: how many steps lie between averages, by what an average and a step take.

Replicas tell each other in each average, inside its own message, what they knew after the one before: how long it took,
and how long their steps took until then. All hear the same numbers, so all decide alike, after the same step; and what
an average will decide is settled by the one before, so that a run that goes on from a checkpoint between them decides
the same. The numbers:

    s   seconds of a step: the slowest replica's median
    E   seconds of an average: the least of all replicas, for who comes last waits for nobody

Both are medians of the last three averages. A process's first step and first average, which open files and connections,
are not counted. An average that travels behind `overlap` steps costs only what they do not hide,
V = max(0, E - overlap s). With a share d of the run at its start in which averages are four times as frequent (E' is
what one costs there), communication is a share f of the time at

    period = (4 d E' + (1 - d) V) / s (1 / f - 1)       f: a tenth

The period is that, rounded up, but no longer than lets a run have 20 averages. A period that is
about right stays: it is changed by a quarter at least, and shortened by a third at least.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import Tensor

from echelon.core.state_tree import StateTree, StateView
from echelon.core.units import format_seconds
from echelon.observe.phases import device_mark

_Moment = float | torch.cuda.Event

SHARE = 0.1
"""Of the time, what communication may take."""
FIRST = 4
"""Steps between averages before anything is known; a quarter of it in the warm-up."""
DENSER = 4
"""How many times as frequent averages are in the warm-up."""
LONGEST = 500
"""As far apart as replicas were measured to agree in the literature (Douillard et al. 2023)."""
LONGEST_UNKNOWN = 64
"""In a run of unknown length."""
TIMES = ":times"
"""Under which name what replicas told each other stands beside the means of an average; no parameter begins so."""
_WINDOW = 3
_UP, _DOWN = 1.25, 1.5
_ROUNDED = 1e-6


AUTO = "auto"


@dataclass(frozen=True)
class PeriodChange:
    """The period changes.

    Attributes:
        step: after which all replicas decided so.
        old, new: steps between averages, after the warm-up.
        reason: in words.
    """

    step: int
    old: int
    new: int
    reason: str


@dataclass(frozen=True)
class PeriodState:
    """What all replicas know alike.

    Attributes:
        period: steps between averages, after the warm-up.
        taken: local step of the last average.
        heard: of the last averages, seconds of a step and of the average.
        planned: local step and period of each decision that was made when the steps to come were trained before.
    """

    period: int
    taken: int = 0
    heard: tuple[tuple[float, float], ...] = ()
    planned: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class PeriodControl:
    """Decides on the period; a pure function of what is told.

    Attributes:
        most: the longest period.
        overlap: steps that an average travels behind the computation.
        dense: local steps of the warm-up.
        steps: local steps of the run; 0: not known.
        dense_waits: in the warm-up nothing is hidden.
    """

    most: int
    overlap: int = 0
    dense: int = 0
    steps: int = 0
    dense_waits: bool = True

    @property
    def least(self) -> int:
        """The shortest period: an average lands before the next one is taken."""
        return self.overlap + 1

    def start(self) -> PeriodState:
        """Return the state before the first step."""
        return PeriodState(self._within(max(FIRST, self.least)))

    def due(self, state: PeriodState) -> int:
        """Return the local step after which the next average is taken."""
        if state.taken >= self.dense:
            return state.taken + state.period
        travels = 0 if self.dense_waits else self.overlap
        return state.taken + max(-(-state.period // DENSER), travels + 1)

    def told(
        self, state: PeriodState, step: int, times: Sequence[Sequence[float]]
    ) -> tuple[PeriodState, PeriodChange | None]:
        """Return the state after an average has landed, and the change that it brings.

        Args:
            step: after which it has landed.
            times: of each replica, seconds of a step and of the average before; 0: it does not know.
        """
        known = [(s, e) for s, e in times if s > 0 and e > 0]
        if known:
            heard = (max(s for s, _ in known), min(e for _, e in known))
            state = replace(state, heard=(*state.heard, heard)[-_WINDOW:])
        if state.planned:
            return self._decided_before(state, step)
        return self._decided(state, step) if known else (state, None)

    def _decided_before(self, state: PeriodState, step: int) -> tuple[PeriodState, PeriodChange | None]:
        """Decide as before; nothing else is decided until the last of these steps."""
        now = [period for at, period in state.planned if at <= step]
        state = replace(state, planned=tuple(pair for pair in state.planned if pair[0] > step))
        old, period = state.period, max(self.least, now[-1]) if now else state.period
        if period == old:
            return state, None
        return replace(state, period=period), PeriodChange(step, old, period, "as when these steps were trained before")

    def _decided(self, state: PeriodState, step: int) -> tuple[PeriodState, PeriodChange | None]:
        step_s, average_s = (median(values) for values in zip(*state.heard, strict=True))
        wanted = self.wanted(step_s, average_s)
        period, old = self._within(wanted), state.period
        first = len(state.heard) == 1
        if period == old or (not first and old / _DOWN < period < old * _UP):
            return state, None
        took = f"an average takes {format_seconds(average_s)} and a step {format_seconds(step_s)}"
        if wanted > self.most:
            why = f"a run of {self.steps} steps is to have more averages" if self.steps else "it is the longest"
            reason = f"{took}; {wanted} steps would keep communication at a tenth of the time, but {why}"
        elif wanted < self.least:
            reason = f"{took}; it is the least with overlap {self.overlap}"
        else:
            reason = f"{took}, which keeps communication at a tenth of the time"
        return replace(state, period=period), PeriodChange(step, old, period, reason)

    def wanted(self, step_s: float, average_s: float) -> int:
        """Return the least period with which communication is `SHARE` of the time of a whole run."""
        hidden_s = self.overlap * step_s
        late_s = max(0.0, average_s - hidden_s)
        early_s = average_s if self.dense_waits else late_s
        share = self.dense / self.steps if self.steps else 0.0
        mean_s = DENSER * share * early_s + (1 - share) * late_s
        return max(1, math.ceil(mean_s / step_s * (1 / SHARE - 1) - _ROUNDED))

    def _within(self, period: int) -> int:
        return max(self.least, min(self.most, period))


class PeriodFollower:
    """A replica's side: it measures, tells, and holds what all have decided."""

    def __init__(self, control: PeriodControl, device: torch.device, noted: Callable[[PeriodChange], None]) -> None:
        """Prepare; `noted` hears what is decided."""
        self._control, self._state, self._noted = control, control.start(), noted
        self._device = device
        self._computes_since: _Moment | None = None
        self._steps: list[list[tuple[_Moment, _Moment]]] = []  # since the last average: what of each was no average
        self._begun = self._averages = 0  # by this process
        self._entered_s = self._step_s = self._average_s = 0.0

    @property
    def period(self) -> int:
        """Steps between averages now, after the warm-up."""
        return self._state.period

    @property
    def due(self) -> int:
        """The local step after which the next average is taken, as is known by now."""
        return self._control.due(self._state)

    def begin_step(self) -> None:
        """Hear that a step begins."""
        self._end_span()
        self._steps.append([])
        self._begun += 1
        self._computes_since = self._moment()

    def enter(self) -> None:
        """Hear that replicas begin to agree."""
        self._end_span()
        self._settle()
        self._entered_s = time.perf_counter()

    def take(self, step: int) -> tuple[float, float]:
        """Note that an average is taken after a local step; return what this replica tells with it."""
        self._state = replace(self._state, taken=step)
        return self._step_s, self._average_s

    def leave(self) -> None:
        """Hear that training goes on."""
        self._settle()
        self._computes_since = self._moment()

    def _end_span(self) -> None:
        if self._computes_since is not None and self._steps:
            self._steps[-1].append((self._computes_since, self._moment()))
        self._computes_since = None

    def _moment(self) -> _Moment:
        """Return the present moment: on a GPU, of what it computes, which the host does not wait for."""
        return device_mark() if self._device.type == "cuda" else time.perf_counter()

    def _take_steps_s(self) -> list[float]:
        """Return the seconds of the steps that have ended, once; a process's first one is not among them."""
        ended, self._steps = self._steps[:-1], self._steps[-1:]
        first = self._begun - len(ended) - len(self._steps)
        return [sum(_apart_s(*span) for span in spans) for number, spans in enumerate(ended, first) if number]

    def landed(self, step: int, times: Tensor | None, took_s: float | None) -> bool:
        """Decide after a local step by what all told, [replicas, 2]; returns whether the period changes.

        Args:
            took_s: seconds of an average that travelled behind the computation, 0: they are not known; None: the
                replica has waited for it since `enter`.
        """
        self._settle()
        if took_s is None:
            took_s = time.perf_counter() - self._entered_s
        self._averages += took_s > 0
        if self._averages > 1:
            self._average_s = took_s or self._average_s
        if steps_s := self._take_steps_s():
            self._step_s = median(steps_s)
        if times is None:
            return False
        self._state, change = self._control.told(self._state, step, times.tolist())
        if change is not None:
            self._noted(change)
        return change is not None

    def _settle(self) -> None:
        """Wait for what a GPU has yet to compute: the host's clock is read."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def replay(self, decided: Sequence[tuple[int, int]]) -> None:
        """Decide as before after these local steps, with these periods; then by what is measured."""
        self._state = replace(self._state, planned=tuple(sorted(decided)))

    def state_dict(self) -> StateTree:
        """Return what all know, and what this replica will tell next."""
        state = self._state
        return {
            "period": state.period, "taken": state.taken, "heard": [list(pair) for pair in state.heard],
            "planned": [list(pair) for pair in state.planned], "tells": [self._step_s, self._average_s],
        }  # fmt: skip

    def shared(self) -> StateTree:
        """Return what all know."""
        return {**self.state_dict(), "tells": [0.0, 0.0]}

    def take_shared(self, state: StateView, step: int) -> None:
        """Take over what `shared` returned on a replica that is further: it may have decided something."""
        old = self.period
        self.load_state_dict(state, step)
        if self.period != old:
            self._noted(PeriodChange(step, old, self.period, "as workers decided that were a step ahead"))

    def load_state_dict(self, state: StateView, step: int) -> None:
        """Take back what either returned; of a run whose period was fixed (empty) the controller starts at its step."""
        control = self._control
        if not state:
            self._state = replace(control.start(), taken=step)
            return
        heard = tuple((float(s), float(e)) for s, e in state["heard"])
        planned = tuple((int(at), int(period)) for at, period in state["planned"])
        period = max(control.least, int(state["period"]))
        self._state = PeriodState(period, int(state["taken"]), heard, planned)
        self._step_s, self._average_s = (float(seconds) for seconds in state["tells"])


def longest_period(steps: int, dense: int, fewest: int, least: int) -> int:
    """Return the longest period of a run that is to have so many averages.

    Args:
        steps: local ones; 0: not known.
        dense: of these, those of the warm-up.
    """
    if not steps:
        return max(least, LONGEST_UNKNOWN)
    longest = min(LONGEST, max(1, (steps + (DENSER - 1) * dense) // fewest))
    while longest > 1 and dense // -(-longest // DENSER) + (steps - dense) // longest < fewest:
        longest -= 1
    return max(least, longest)


def _apart_s(begin: _Moment, end: _Moment) -> float:
    if isinstance(begin, float) and isinstance(end, float):
        return end - begin
    assert isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event)
    return begin.elapsed_time(end) / 1e3


def first_period(period: int | str, overlap: int) -> int:
    """Return the period that a run begins with: the one that is set, or of `auto` the least that lets averages land."""
    return period if isinstance(period, int) else max(FIRST, overlap + 1)
