"""How long a process takes for what it does, and from when on one that still runs hangs rather than is slow."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from echelon.launch.culprit import Hang, Observed, find_hang
from echelon.observe.notes import START, Note
from echelon.observe.phases import Phase

LOOK_S = 0.5
GAP_S = 2.0  # between two looks, that count: in more, the launcher itself was stopped
HANGS_LEAST_S = 10.0
HANGS_TIMES_LONGEST = 10.0
SHARE_OF_DEADLINE = 0.9
_COMPUTES = (Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE)  # data may come from a network that pauses
_IDLE = 0.02  # processor seconds a second: who uses less waits
_TIMES_WORK = 3.0
_MAY_TAKE_LONG = (  # compilers, which meet a new shape in the midst of a run, and debuggers
    "/torch/_dynamo/", "/torch/_inductor/", "/torch/utils/cpp_extension", "/triton/", "/debugpy/", "/pydevd", "/bdb.py",
)  # fmt: skip


@dataclass
class Rhythm:
    """How long the activities of a process take: the present one, and the longest before, of steps.

    Attributes:
        longest_s: the longest activity; 0: it has finished none of a step.
        longest_work_s: the most processor time that one took.
        seen_s: for how long the present activity has been looked at.
    """

    pid: int
    changes: int
    activity: str
    step: int
    still_s: float
    looked_s: float
    longest_s: float = 0.0
    longest_work_s: float = 0.0
    seen_s: float = 0.0
    work_s: float = 0.0
    work_began_s: float = 0.0

    @classmethod
    def begin(cls, note: Note, now: float) -> Rhythm:
        """Begin to follow a process."""
        rhythm = cls(note.pid, note.changes, note.activity, note.step, now - note.since_s, now)
        rhythm.work_began_s = processor_s(note.pid)
        return rhythm

    def go_on(self, note: Note, now: float) -> None:
        """Take a newer note; how long a start or a first step took says nothing of the steps that follow."""
        worked_s = processor_s(note.pid)
        self.work_s, self.seen_s = worked_s - self.work_began_s, self.seen_s + min(now - self.looked_s, GAP_S)
        if note.changes != self.changes:
            if note.step > 1:
                self.longest_s = max(self.longest_s, self.still_s if self.step > 1 else 0.0, LOOK_S)
                self.longest_work_s = max(self.longest_work_s, self.work_s if self.step > 1 else 0.0, LOOK_S)
            self.work_began_s, self.work_s, self.seen_s = worked_s, 0.0, 0.0
        self.changes, self.activity, self.step = note.changes, note.activity, note.step
        self.still_s, self.looked_s = now - note.since_s, now

    def is_late(self, most_s: float) -> bool:
        """Whether it is in a part of a step for ten times as long as it ever was, and at least 10 s; or `most_s`.

        A process that gets less of the processor than it needs, or waits for a disk, is not late: one that hangs turns
        in a loop, and has used three times the processor time of its longest part, or waits for what never comes,
        and uses none.
        """
        if self.activity not in _COMPUTES or not self.longest_s:
            return False
        if self.seen_s < min(max(HANGS_LEAST_S, HANGS_TIMES_LONGEST * self.longest_s), most_s):
            return False
        is_idle = self.work_s < _IDLE * self.seen_s and not waits_for_disk(self.pid)
        return is_idle or self.work_s > _TIMES_WORK * self.longest_work_s


def find_late(observed: list[Observed], late: set[str], now: float) -> Hang | None:
    """Return the process that all others wait for in the midst of a step, if it is one of those that are late.

    Args:
        observed: what all processes of this machine are at.
        late: names of those that `Rhythm.is_late` tells of.
        now: by `time.monotonic`.
    """
    trains = [o for o in observed if o.note.activity != START]
    acting = [o for o in trains if not o.waits]
    if len(acting) != 1 or acting[0].process.name not in late or acting[0].is_stopped:
        return None
    frames = acting[0].stack.frames if acting[0].stack is not None else ()
    if any(part in frame.file for frame in frames for part in _MAY_TAKE_LONG):
        return None
    hang = find_hang(trains, now, HANGS_LEAST_S / 2)
    return hang if hang is not None and len(hang.waiting) == len(trains) - 1 else None


def processor_s(pid: int) -> float:
    """Return the processor time that a process has used, of all its threads; 0 where that is not known."""
    try:
        values = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    except OSError:  # it is gone
        return 0.0
    user, system = int(values[11]), int(values[12])
    return (user + system) / os.sysconf("SC_CLK_TCK")


def waits_for_disk(pid: int) -> bool:
    """Whether a process's main thread is in a wait that no signal ends, as for a disk."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1] == "D"
    except OSError:
        return False
