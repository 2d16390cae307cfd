"""Where the processes of a job note what they are at: memory of the launcher's, that each of them writes a place of.

It is memory without a file (`memfd`), reached through the launcher's own entry in /proc: no disk that is full, no
/dev/shm that is read-only or small can make a note fail.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from echelon.launch.places.base import Job, Process
from echelon.observe.notes import SLOT_BYTES, VARIABLE, Note

_STACKS_BYTES = 1 << 20


@dataclass(frozen=True)
class _Place:
    slot: int
    stacks: int  # file descriptor


class NoticeBoard:
    """The notes of processes by name, and the stacks that they were asked for."""

    def __init__(self, names: Sequence[str]) -> None:
        """Make room for a note and stacks of each process."""
        self._file = os.memfd_create("echelon-notes")
        self._memory = self._of_size(len(names))
        self._places = {name: _Place(slot, os.memfd_create("echelon-stacks")) for slot, name in enumerate(names)}

    def noted(self, job: Job) -> Job:
        """Return a job whose processes know where to write their notes."""
        groups = (replace(g, processes=tuple(map(self._noted, g.processes))) for g in job.groups)
        return replace(job, groups=tuple(groups))

    def add(self, process: Process) -> Process:
        """Make room for one process more; returns it as it knows where to write."""
        self._memory = self._of_size(len(self._places) + 1)
        self._places[process.name] = _Place(len(self._places), os.memfd_create("echelon-stacks"))
        return self._noted(process)

    def _of_size(self, places: int) -> memoryview:
        os.ftruncate(self._file, max(1, places) * SLOT_BYTES)
        return memoryview(mmap.mmap(self._file, 0))

    def _noted(self, process: Process) -> Process:
        place, here = self._places[process.name], f"/proc/{os.getpid()}/fd"
        where = f"{here}/{self._file}:{place.slot}:{here}/{place.stacks}"
        return replace(process, environment={**process.environment, VARIABLE: where})

    def note(self, name: str, pid: int) -> Note | None:
        """Return what a process wrote last; None: nothing, or only one that had its name before."""
        note = self._of(self._places[name])
        return note if note is not None and note.pid == pid else None

    def has_trained(self) -> bool:
        """Whether one of the processes, as they are now or were last, has finished a step."""
        notes = (self._of(place) for place in self._places.values())
        return any(note is not None and note.finished for note in notes)

    def _of(self, place: _Place) -> Note | None:
        begin = place.slot * SLOT_BYTES
        return Note.read(self._memory[begin : begin + SLOT_BYTES])

    def stacks(self, name: str) -> str:
        """Return the stacks that a process has written since they were cleared."""
        return os.pread(self._places[name].stacks, _STACKS_BYTES, 0).decode(errors="replace")

    def clear_stacks(self, name: str) -> None:
        """Forget the stacks of a process."""
        os.ftruncate(self._places[name].stacks, 0)

    def close(self) -> None:
        """Give the memory back."""
        for descriptor in (self._file, *(place.stacks for place in self._places.values())):
            os.close(descriptor)
        self._places.clear()
