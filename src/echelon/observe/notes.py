"""What a process is at, in memory that its launcher reads without its help: also when it hangs and holds the GIL.

A process notes its phase and step by a few stores of eight bytes each, which need no lock and no thread. On a signal
its main thread writes its Python stack: on `ASK_SIGNAL` between two instructions, on `STACK_SIGNAL` at once
(`faulthandler`, whose handler needs no GIL either). The latter is for a thread that is in code that is not Python's:
in one that calls and returns, its frames may lie in memory that has just been given back, and the process would die.
"""

from __future__ import annotations

import faulthandler
import logging
import mmap
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from types import FrameType

from echelon.observe.phases import CALLBACKS, PHASE_NAMES, Phase, PhaseClock, WrappedClock

VARIABLE = "ECHELON_NOTES"  # FILE of notes, place in it, FILE for stacks; joined by colons
SLOT_BYTES = 72
START = "start"
SERVING = "serving"  # what a process does all the time that answers others, and waits for them
ACTIVITIES = (START, *PHASE_NAMES, "evaluation", "checkpoint", "recording", SERVING, CALLBACKS)
STACK_SIGNAL = (signal.SIGRTMIN + 11) if sys.platform == "linux" else signal.SIGUSR1  # programs rarely use it
ASK_SIGNAL = (signal.SIGRTMIN + 10) if sys.platform == "linux" else signal.SIGUSR2

_ACTIVITY, _STEP, _SINCE, _CHANGES, _PID, _THREAD, _ANSWERS, _FAILED, _FINISHED = range(9)
_NUMBERS = {name: float(i) for i, name in enumerate(ACTIVITIES)}
_OTHER = _NUMBERS[Phase.OTHER]


@dataclass(frozen=True)
class Note:
    """What a process wrote last.

    Attributes:
        activity: a phase of the step, or one of the other `ACTIVITIES`.
        step: that it works on, from 1; 0: none yet.
        since_s: when the activity began, by `time.monotonic`.
        changes: of activity so far.
        thread: the identity of its main thread.
        answers: whether it writes its stack on `ASK_SIGNAL` and `STACK_SIGNAL`.
        failed: it ended with the error of a communication.
        finished: steps, since it began.
    """

    activity: str
    step: int
    since_s: float
    changes: int
    pid: int
    thread: int
    answers: bool
    failed: bool
    finished: int = 0

    @classmethod
    def read(cls, memory: memoryview) -> Note | None:
        """Read a place of `SLOT_BYTES`; None where nobody has written yet."""
        numbers = memory.cast("d")
        for _ in range(3):  # the writer may be between two stores
            values = numbers.tolist()
            if values == numbers.tolist():
                break
        if not values[_PID]:
            return None
        return cls(
            ACTIVITIES[int(values[_ACTIVITY])], int(values[_STEP]), values[_SINCE], int(values[_CHANGES]),
            int(values[_PID]), int(values[_THREAD]), bool(values[_ANSWERS]), bool(values[_FAILED]),
            int(values[_FINISHED]),
        )  # fmt: skip


class RankNotes:
    """The notes of this process; without a launcher that reads them they stay in its own memory."""

    def __init__(self, memory: memoryview | None = None, stacks: int | None = None) -> None:
        """Begin in `memory`; `stacks` is a file descriptor for the stacks that signals ask for."""
        self._numbers = (memory if memory is not None else memoryview(bytearray(SLOT_BYTES))).cast("d")
        if stacks is not None:
            signal.signal(ASK_SIGNAL, partial(_write_stack, stacks))
            signal.siginterrupt(ASK_SIGNAL, False)  # the system's calls in code that is not Python's go on
            # Of this thread alone: walking the frames of one that runs may read memory that is no frame any more.
            faulthandler.register(STACK_SIGNAL, file=stacks, all_threads=False)
        for place in range(SLOT_BYTES // self._numbers.itemsize):
            self._numbers[place] = 0.0
        self._numbers[_SINCE] = time.monotonic()
        self._numbers[_THREAD] = float(threading.main_thread().ident or 0)
        self._numbers[_ANSWERS] = stacks is not None
        self._numbers[_PID] = os.getpid()  # last: until then nothing is read

    def enter(self, activity: str | None) -> None:
        """Note that an activity begins; None: something between two steps."""
        numbers = self._numbers
        numbers[_ACTIVITY] = _OTHER if activity is None else _NUMBERS[activity]
        numbers[_SINCE] = time.monotonic()
        numbers[_CHANGES] += 1

    def at_step(self, step: int) -> None:
        """Note which step begins, from 1."""
        self._numbers[_STEP] = step

    @property
    def step(self) -> int:
        """The step that it works on, from 1; 0: none yet."""
        return int(self._numbers[_STEP])

    def finish_step(self) -> None:
        """Note that a step is done."""
        self._numbers[_FINISHED] += 1

    @property
    def finished(self) -> int:
        """Steps that this process has finished since it began."""
        return int(self._numbers[_FINISHED])

    def fail(self) -> None:
        """Note that this process ends because a communication failed."""
        self._numbers[_FAILED] = 1


def _write_stack(file: int, _: int, frame: FrameType | None) -> None:
    """Write a stack as `faulthandler` does."""
    lines = ["Stack (most recent call first):"]
    while frame is not None:
        code = frame.f_code
        lines.append(f'  File "{code.co_filename}", line {frame.f_lineno} in {code.co_name}')
        frame = frame.f_back
    with suppress(OSError):  # nobody can read it: that is no fault of what this process is at
        os.write(file, "\n".join([*lines, ""]).encode(errors="replace"))


def open_notes() -> RankNotes:
    """Open the notes that the launcher of this process reads, if there is one that does."""
    described = os.environ.get(VARIABLE, "")
    if not described:
        return RankNotes()
    notes_file, slot, stacks_file = described.split(":")
    try:
        with open(notes_file, "r+b") as file:  # noqa: PTH123 - the kernel's name of the launcher's memory
            memory = memoryview(mmap.mmap(file.fileno(), 0))
        stacks = os.open(stacks_file, os.O_WRONLY | os.O_APPEND)
    except OSError as error:
        logging.warning("the launcher cannot see what this process is at: %s", error)
        return RankNotes()
    begin = int(slot) * SLOT_BYTES
    return RankNotes(memory[begin : begin + SLOT_BYTES], stacks)


class NotedClock(WrappedClock):
    """A phase clock whose phases are noted as they begin."""

    def __init__(self, clock: PhaseClock, notes: RankNotes) -> None:
        super().__init__(clock)
        self._notes = notes

    def enter(self, phase: Phase | None) -> None:
        """Begin a phase now, or a pause."""
        self._notes.enter(phase)
        self._clock.enter(phase)

    def only_waits(self) -> None:
        """Note that the present phase only waits for other ranks from now on; `split` divides the time later."""
        self._notes.enter(Phase.COMMUNICATE)
