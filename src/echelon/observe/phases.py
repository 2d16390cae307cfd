"""Where the time of a step goes.

On a CPU the clock is read at each boundary. On a GPU work is queued, so events are recorded in the stream and read
later, without making the device wait.
"""

from __future__ import annotations

import time
from enum import StrEnum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Phase(StrEnum):
    """The phases of a step. `communicate` is what is exposed: not hidden behind backward."""

    DATA = "data"
    FORWARD = "forward"
    BACKWARD = "backward"
    COMMUNICATE = "communicate"
    UPDATE = "update"
    OTHER = "other"


PHASES = list(Phase)
PHASE_NAMES = tuple(phase.value for phase in PHASES)

RECORDING = "recording"
CALLBACKS = "callbacks"
PAUSES = ("evaluation", "checkpoint", RECORDING, CALLBACKS)
"""What interrupts the steps; recording is adding up over the ranks, and what rank 0 writes and shows."""


def phase_name(phase: str) -> str:
    """Say a phase as all pages and the terminal do."""
    return "communication" if phase == Phase.COMMUNICATE else str(phase)


def phase_share(phase_s: float, steps_s: float) -> float:
    """Return the share of the time of steps (pauses between them left out) that a phase takes, on a rank or the mean.

    That of `communicate` is the share of communication, wherever one is told: what a rank waits for messages that
    backward does not hide, and for ranks that are slower. It is told of a rank, and otherwise is the mean of the ranks.
    """
    return phase_s / steps_s if steps_s > 0 else 0.0


class PhaseClock(Protocol):
    """Divides time into phases: `enter` ends the phase before and begins the next."""

    def enter(self, phase: Phase | None) -> None:
        """Begin a phase now; None: a pause between steps, which counts for no phase."""

    def only_waits(self) -> None:
        """Hear that the present phase only waits for other ranks from now on; `split` divides the time later."""

    def split(self, phase: Phase, at: object) -> None:
        """End the phase before at an earlier moment, taken with `mark`, from which on `phase` counts."""

    def drain(self) -> list[float]:
        """Return seconds per phase since the last call, in the order of `PHASES`, and start anew."""

    def so_far(self) -> list[float] | None:
        """Return seconds per phase since the last `drain`; None where that would make a device wait."""

    def end_step(self) -> None:
        """Hear that a step ends here, where `so_far` cannot tell how long it was."""

    def take_steps(self) -> list[list[float]]:
        """Return seconds per phase of each step that ended before the last `drain`, once; only of `end_step`'s."""


def mark() -> float:
    """Take a moment for `PhaseClock.split` on a CPU."""
    return time.perf_counter()


class WrappedClock:
    """A phase clock around another, which does what a subclass leaves to it."""

    def __init__(self, clock: PhaseClock) -> None:
        self._clock = clock

    def enter(self, phase: Phase | None) -> None:
        """Begin a phase now, or a pause."""
        self._clock.enter(phase)

    def only_waits(self) -> None:
        """Hear that the present phase only waits for other ranks from now on."""
        self._clock.only_waits()

    def split(self, phase: Phase, at: object) -> None:
        """End the phase before at an earlier moment."""
        self._clock.split(phase, at)

    def drain(self) -> list[float]:
        """Return seconds per phase since the last call, and start anew."""
        return self._clock.drain()

    def so_far(self) -> list[float] | None:
        """Return seconds per phase since the last `drain`."""
        return self._clock.so_far()

    def end_step(self) -> None:
        """Hear that a step ends here."""
        self._clock.end_step()

    def take_steps(self) -> list[list[float]]:
        """Return seconds per phase of each step that ended before the last `drain`."""
        return self._clock.take_steps()


class HostClock:
    """Phases by the host's clock, for CPU training."""

    def __init__(self) -> None:
        self._seconds = _zeros()
        self._phase: Phase | None = Phase.OTHER
        self._since = time.perf_counter()

    def enter(self, phase: Phase | None) -> None:
        """Begin a phase now, or a pause."""
        now = time.perf_counter()
        self._seconds[self._phase] += now - self._since
        self._phase, self._since = phase, now

    def only_waits(self) -> None:
        """Do nothing: time is divided by `split`."""

    def split(self, phase: Phase, at: object) -> None:
        """End the present phase at `at` (seconds of `mark`), when that lies within it; `phase` begins there."""
        assert isinstance(at, float)
        moment = max(at, self._since)
        self._seconds[self._phase] += moment - self._since
        self._phase, self._since = phase, moment

    def drain(self) -> list[float]:
        """Return seconds per phase since the last call, and start anew."""
        seconds = self.so_far()
        self._seconds = _zeros()
        return seconds

    def so_far(self) -> list[float]:
        """Return seconds per phase since the last `drain`, this moment included."""
        self.enter(self._phase)
        *seconds, _ = self._seconds.values()  # in the order of `_zeros`, whose last are the pauses
        return seconds

    def end_step(self) -> None:
        """Do nothing: `so_far` tells."""

    def take_steps(self) -> list[list[float]]:
        """Return nothing: `so_far` tells."""
        return []


class DeviceClock:
    """Phases by events in the current CUDA stream; waiting for input is what the host adds (`data`).

    The stream runs behind the host, so a phase's seconds are those between its events on the device.
    """

    def __init__(self) -> None:
        self._marks: list[tuple[Phase | None, torch.cuda.Event]] = []
        self._ends: list[int] = []  # of steps: places among the marks
        self._steps: list[list[float]] = []
        self.enter(Phase.OTHER)

    def enter(self, phase: Phase | None) -> None:
        """Begin a phase, or a pause, at this place in the stream."""
        self._marks.append((phase, device_mark()))

    def only_waits(self) -> None:
        """Do nothing: time is divided by `split`."""

    def split(self, phase: Phase, at: object) -> None:
        """Begin `phase` at an event recorded earlier."""
        import torch

        assert isinstance(at, torch.cuda.Event)
        self._marks.append((phase, at))

    def drain(self) -> list[float]:
        """Return seconds per phase since the last call; waits for the stream to reach this place."""
        last = self._marks[-1][0]
        self.enter(last)
        self._marks[-1][1].synchronize()
        seconds, of_step, ends = _zeros(), _zeros(), set(self._ends)
        for place, ((phase, begin), (_, end)) in enumerate(zip(self._marks, self._marks[1:], strict=False), 1):
            took_s = max(0.0, begin.elapsed_time(end) / 1e3)
            seconds[phase] += took_s
            of_step[phase] += took_s
            if place in ends:
                self._steps.append([of_step[p] for p in PHASES])
                of_step = _zeros()
        self._marks, self._ends = self._marks[-1:], []
        return [seconds[p] for p in PHASES]

    def so_far(self) -> None:
        """The stream runs behind: nothing is known without waiting for it."""
        return None

    def end_step(self) -> None:
        """Note that a step ends at this place in the stream."""
        self.enter(self._marks[-1][0])
        self._ends.append(len(self._marks) - 1)

    def take_steps(self) -> list[list[float]]:
        """Return seconds per phase of each step that ended before the last `drain`, once."""
        steps, self._steps = self._steps, []
        return steps


def _zeros() -> dict[Phase | None, float]:
    return dict.fromkeys([*PHASES, None], 0.0)


def device_mark() -> torch.cuda.Event:
    """Record a timing event in the current CUDA stream."""
    import torch

    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def make_clock(device_type: str) -> PhaseClock:
    """Return the clock for `cpu` or `cuda`."""
    return DeviceClock() if device_type == "cuda" else HostClock()
