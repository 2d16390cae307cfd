"""How long a process takes for what it does, and from when on one that still runs hangs rather than is slow."""

from __future__ import annotations

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import inf
from pathlib import Path

from echelon.launch.culprit import Hang, Observed, find_hang
from echelon.observe.notes import START, Note
from echelon.observe.phases import Phase
from echelon.observe.stacks import Stack

LOOK_S = 0.5
GAP_S = 2.0  # between two looks, that count: in more, the launcher itself was stopped
HANGS_LEAST_S = 10.0
HANGS_TIMES_LONGEST = 10.0
BUSY_SHARE_OF_DEADLINE = 0.5  # a rare sample may take long
SHARE_OF_DEADLINE = 0.9
_COMPUTES = (Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE)  # data may come from a network that pauses
_IDLE = 0.02  # processor seconds a second: who uses less waits
_TIMES_WORK = 3.0
_RUNS = 0.2  # of the looks: threads beside the main one wake now and then, and wait for a processor then
_SLEEPS = {"S", "I", "T", "t"}  # states of threads, as the kernel tells them
_MAY_TAKE_LONG = (  # compilers, which meet a new shape in the midst of a run, and debuggers
    "/torch/_dynamo/", "/torch/_inductor/", "/torch/utils/cpp_extension", "/triton/", "/debugpy/", "/pydevd", "/bdb.py",
)  # fmt: skip


@dataclass
class Rhythm:
    """How long the activities of a process take: the present one, and the longest before, of steps.

    Attributes:
        finished: steps that this process has finished since it began.
        longest_s: the longest activity; 0: it has finished none beyond its first step.
        longest_work_s: the most processor time that one took.
        seen_s: for how long the present activity has been looked at.
        work_s: the processor time of the present activity; None: not known.
        acted: the sum of what `acts` returned at so many `looks` at the present activity.
    """

    pid: int
    changes: int
    activity: str
    finished: int
    still_s: float
    looked_s: float
    used_s: float | None
    longest_s: float = 0.0
    longest_work_s: float = 0.0
    seen_s: float = 0.0
    work_s: float | None = None
    acted: float = 0.0
    looks: int = 0

    @classmethod
    def begin(cls, note: Note, now: float) -> Rhythm:
        """Begin to follow a process."""
        used_s = processor_s(note.pid)
        return cls(note.pid, note.changes, note.activity, note.finished, now - note.since_s, now, used_s)

    def go_on(self, note: Note, now: float) -> None:
        """Take a newer note; how long a start or a first step took says nothing of the steps that follow.

        The first step is the first of this process, wherever its run is: it builds and compiles what the others use.
        """
        used_s = processor_s(note.pid)
        self.work_s = used_s - self.used_s if used_s is not None and self.used_s is not None else None
        self.seen_s += min(now - self.looked_s, GAP_S)
        if note.changes == self.changes:
            self.acted, self.looks = self.acted + acts(note.pid), self.looks + 1
        else:
            self._end_activity(note)
            self.used_s, self.work_s, self.seen_s = used_s, None, 0.0
            self.acted, self.looks = 0.0, 0
        self.changes, self.activity, self.finished = note.changes, note.activity, note.finished
        self.still_s, self.looked_s = now - note.since_s, now

    def _end_activity(self, note: Note) -> None:
        if note.finished < 2:  # all that has ended was of the first step, or before the second
            return
        of_later = self.finished > 0
        self.longest_s = max(self.longest_s, self.still_s if of_later else 0.0, LOOK_S)
        self.longest_work_s = max(self.longest_work_s, (self.work_s or 0.0) if of_later else 0.0, LOOK_S)

    def is_late(self, deadline_s: float) -> bool:
        """Whether it turns in a loop for over half of a deadline, or is in a part of a step for nine tenths of it.

        Who turns in a loop has used three times the processor time of its longest part, and taken ten times as long.
        """
        if self.activity in (*_COMPUTES, Phase.DATA) and self.seen_s > SHARE_OF_DEADLINE * deadline_s:
            return True
        if self.seen_s < BUSY_SHARE_OF_DEADLINE * deadline_s or self.work_s is None:
            return False
        return self._is_beyond_longest and self.work_s > _TIMES_WORK * self.longest_work_s

    @property
    def is_idle(self) -> bool:
        """Whether it uses no processor in a part of a step, for ten times as long as it ever was in one, and 10 s.

        A process that gets less of the processor than it needs, or waits for a disk, is not idle.
        """
        if self.seen_s < HANGS_LEAST_S or self.acted > _RUNS * self.looks or self.work_s is None:
            return False
        return self._is_beyond_longest and self.work_s < _IDLE * self.seen_s

    @property
    def _is_beyond_longest(self) -> bool:
        longest_s = HANGS_TIMES_LONGEST * self.longest_s
        return self.activity in _COMPUTES and longest_s > 0 and self.seen_s >= longest_s


def find_late(observed: Sequence[Observed], late: Collection[str], now: float, still_s: float) -> Hang | None:
    """Return the process that all others wait for in the midst of a step, if it is one of those that are late.

    Args:
        observed: what all processes of the run are at.
        late: names of those that `Rhythm` tells of.
        now: by `time.monotonic`.
        still_s: for how long the others have waited at least.
    """
    trains = [o for o in observed if o.note.activity != START]
    acting = [o for o in trains if not o.waits]
    if len(acting) != 1 or acting[0].process.name not in late or acting[0].is_stopped:
        return None
    hang = find_hang(trains, now, still_s)
    if hang is None or may_take_long(hang.stack) or len(hang.waiting) != len(trains) - 1:
        return None
    return hang


def may_take_long(stack: Stack | None) -> bool:
    """Whether a process is in a compiler or a debugger."""
    frames = stack.frames if stack is not None else ()
    return any(part in frame.file for frame in frames for part in _MAY_TAKE_LONG)


def processor_s(pid: int) -> float | None:
    """Return the processor time that a process has used, of all its threads; None where that is not known."""
    values = _stat(Path(f"/proc/{pid}"))
    return (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK") if values else None


def main_thread(pid: int) -> tuple[str, float]:
    """Return the state of a process's main thread, a letter of the kernel's, and the processor time that it has used.

    The state is empty where nothing is known.
    """
    values = _stat(Path(f"/proc/{pid}/task/{pid}"))
    return (values[0], (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK")) if values else ("", 0.0)


def acts(pid: int) -> float:
    """Return 0 if all threads of a process sleep, 1 if one runs or is ready to, infinity if one waits for a disk.

    What is not known counts as a wait for a disk.
    """
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
    except OSError:  # it is gone, or no file is left to read with
        return inf
    states = {(_stat(thread) or [""])[0] for thread in threads} - _SLEEPS
    return inf if states - {"R"} else float(len(states))


def _stat(folder: Path) -> list[str]:
    """Return what the kernel tells of a process or a thread, from its state on; nothing where that is not known."""
    try:
        return (folder / "stat").read_text().rpartition(") ")[2].split()
    except OSError:  # it is gone, or no file is left to read with
        return []
