"""The trainer's side of its loader processes: batches asked for ahead, taken in order."""

from __future__ import annotations

import contextlib
import os
import signal
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait

import numpy as np

from echelon.core.errors import UserError
from echelon.data.base import BadSample
from echelon.data.order import Indices
from echelon.data.process import LoaderReply, start_process
from echelon.data.recipe import Rows
from echelon.data.slots import Slots

AHEAD = 3  # batches under way or ready beside the one in use
_LEAST_ROWS = 8  # that are worth a message


class LoaderFailed(RuntimeError):
    """A loader process died, raised, or gave nothing before the deadline."""


class LoaderTraceback(Exception):
    """Where a loader process raised, as text: the cause of a `LoaderFailed`."""


@dataclass
class _Job:
    slot: int
    size: int
    parts: int
    bad: list[BadSample] = field(default_factory=list)
    refused: str = ""
    error: str = ""
    traceback: str = ""


class Pool:
    """Loader processes that live as long as this object; each batch is cut into a part per process.

    Args:
        rows: makes the samples; forked with all it holds.
        loaders: processes.
        most: samples of the largest batch.
        timeout_s: how long `take` waits for any sign of life.
    """

    def __init__(self, rows: Rows, loaders: int, most: int, timeout_s: float) -> None:
        self.slots = Slots(AHEAD + 1, max(1, most), rows.specs)
        self._timeout_s = timeout_s
        self._free = list(range(AHEAD + 1))
        self._jobs: dict[int, _Job] = {}
        self._stale: dict[int, _Job] = {}
        self._turn = 0
        pairs = [Pipe() for _ in range(loaders)]
        self._pipes = [ours for ours, _ in pairs]
        every = [end for pair in pairs for end in pair]
        self.pids: list[int] = []
        # registered first, so that loaders which did start are ended when a later one cannot
        self._stop = weakref.finalize(self, _end_processes, os.getpid(), self.pids, self._pipes)
        for _, theirs in pairs:
            self.pids.append(start_process(rows, self.slots, theirs, [end for end in every if end is not theirs]))
        for _, theirs in pairs:
            theirs.close()

    @property
    def has_room(self) -> bool:
        """Whether another batch can be asked for."""
        return bool(self._free)

    def request(self, batch: int, epoch: int, indices: Indices, lengths: Sequence[int] = ()) -> None:
        """Ask for a batch of at least one sample; needs room.

        Args:
            lengths: of the leaves that are ragged.

        Raises:
            LoaderFailed: a loader has died.
        """
        job = _Job(self._free.pop(), len(indices), 0)
        self._jobs[batch] = job
        step = max(_LEAST_ROWS, -(-len(indices) // len(self._pipes)))
        for first in range(0, len(indices), step):
            head = np.array([job.slot, first, epoch, len(lengths), *lengths])
            task = np.concatenate([head, indices[first : first + step]])
            loader = self._turn % len(self._pipes)
            try:
                self._pipes[loader].send_bytes(task.astype(np.int64).tobytes())
            except (BrokenPipeError, ConnectionResetError) as error:
                raise self._died(loader) from error
            job.parts += 1
            self._turn += 1

    def ready(self, batch: int) -> bool:
        """Whether a batch can be taken without waiting."""
        self._receive(0.0)
        return batch in self._jobs and self._jobs[batch].parts == 0

    def take(self, batch: int) -> tuple[int, int, list[BadSample]]:
        """Wait for a batch; returns its slot, which the caller gives back with `release`, its size and bad images.

        Raises:
            UserError: one of its images cannot be decoded.
            LoaderFailed: a loader has died or raised, or none gave anything in time.
        """
        job = self._jobs[batch]
        while job.parts:
            if not self._receive(self._timeout_s):
                raise LoaderFailed(
                    f"no loader process gave anything for {self._timeout_s:.0f} s: is the storage stuck?"
                )
        del self._jobs[batch]
        if job.refused or job.error:
            self.release(job.slot)
        if job.refused:
            raise UserError(job.refused)
        if job.error:
            raise LoaderFailed(f"a loader process raised {job.error}") from LoaderTraceback(f"\n{job.traceback}")
        return job.slot, job.size, job.bad

    def release(self, slot: int) -> None:
        """Give a slot back: its memory may be written again."""
        self._free.append(slot)

    def forget(self) -> None:
        """Drop all batches asked for; their slots become free as the loaders finish them.

        Raises:
            LoaderFailed: no slot became free in time.
        """
        for job in self._jobs.values():
            if job.parts:
                self._stale[job.slot] = job
            else:
                self.release(job.slot)
        self._jobs.clear()
        while not self._free:
            if not self._receive(self._timeout_s):
                raise LoaderFailed(
                    f"no loader process gave anything for {self._timeout_s:.0f} s: is the storage stuck?"
                )

    def close(self) -> None:
        """End the loader processes."""
        self._stop()

    def _receive(self, timeout_s: float) -> bool:
        """Handle the replies that are there, or that come in time; False when none did."""
        found = wait(self._pipes, timeout_s)
        for pipe in found:
            assert isinstance(pipe, Connection)
            try:
                reply = LoaderReply.from_json(pipe.recv_bytes())
            except (EOFError, ConnectionResetError) as error:
                raise self._died(self._pipes.index(pipe)) from error
            self._handle(reply)
        return bool(found)

    def _handle(self, reply: LoaderReply) -> None:
        slot = reply.slot
        stale = self._stale.get(slot)
        job = stale or next(each for each in self._jobs.values() if each.slot == slot)
        job.parts -= 1
        job.bad += reply.bad
        job.refused = job.refused or reply.refused
        if reply.error and not job.error:
            job.error, job.traceback = reply.error, reply.traceback
        if stale and not stale.parts:
            del self._stale[slot]
            self.release(slot)

    def _died(self, loader: int) -> LoaderFailed:
        pid = self.pids[loader]
        how = _how_it_ended(pid)
        self.close()
        return LoaderFailed(f"loader process {pid} {how}")


def _how_it_ended(pid: int) -> str:
    deadline = time.monotonic() + 1.0  # its pipe closes a moment before it can be reaped
    while time.monotonic() < deadline:
        try:
            reaped = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        except ChildProcessError:
            break
        if reaped and reaped.si_code == os.CLD_EXITED:
            return f"ended with code {reaped.si_status}"
        if reaped:
            name = signal.Signals(reaped.si_status).name
            return f"was ended by {name}" + (" (out of memory?)" if name == "SIGKILL" else "")
        time.sleep(0.01)
    return "ended"


def _end_processes(owner: int, pids: list[int], pipes: Sequence[Connection]) -> None:
    if os.getpid() != owner:  # a fork of the trainer must not end the trainer's loaders
        return
    for pipe in pipes:
        pipe.close()
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)  # they hold nothing that could be lost
    for pid in pids:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
    pids.clear()
