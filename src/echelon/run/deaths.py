"""What is recorded of the processes of a run: deaths with their reasons, and hangs with who is to blame."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.launch.culprit import Hang, Living, Standstill
from echelon.launch.hangs import HangWatch, NoOthers, Verdict
from echelon.launch.logs import LogLimit
from echelon.launch.noticeboard import NoticeBoard
from echelon.launch.places.base import Job, Place, Started
from echelon.launch.slow import Slow
from echelon.launch.supervisor import Death, Watch
from echelon.records.events import HangSeen, RankFailed, RoleFailed, SlowProcess, WorkerDied
from echelon.records.file import Recorder, newest
from echelon.records.kinds import ProcessStarted, Start
from echelon.run.machine import Machine, say
from echelon.run.out_of_memory import OutOfMemory

if TYPE_CHECKING:
    from echelon.trainer.resolved import ResolvedRun


@contextmanager
def watched(
    machine: Machine, place: Place, run: ResolvedRun, path: Path, record: Recorder
) -> Iterator[tuple[Job, Watch]]:
    """Watch the processes of this machine; gives the job as it is to be run, and what its supervisor tells."""
    chronicle = _Chronicle(machine, path, record)
    logs = LogLimit(path / "logs", run.log_limit)
    if not hasattr(os, "memfd_create"):  # Linux alone
        yield machine.job, replace(chronicle.watch(), on_look=lambda _: logs.look())
        return
    board = NoticeBoard([p.name for group in machine.job.groups for p in group.processes])
    try:
        others, restarts_alone = machine.rounds or NoOthers(), machine.scheduler is not None
        hangs = HangWatch(board, place, others, run.timeout_s, chronicle, ends=restarts_alone)

        def look(living: Sequence[Living]) -> None:
            """See who hangs, and what has become too long."""
            hangs.look(living)
            logs.look()

        yield board.noted(machine.job), replace(chronicle.watch(), on_look=look, explain=_Explain(hangs))
    finally:
        board.close()


class _Explain:
    """Says of a death what it was in truth: the process that the dead one waited for in vain, or one that we ended."""

    def __init__(self, hangs: HangWatch) -> None:
        self._hangs = hangs

    def __call__(self, death: Death, living: Sequence[Living]) -> Death:
        """Return the death as it is to be told."""
        if death.exit_code == -signal.SIGKILL:
            reason = self._hangs.ended(death.pid)
            return replace(death, exit_code=None, hang=f"{reason}, and was ended") if reason else death
        group = dict([(death.name, death.pid), *death.others])
        exited = set(group) - {process.name for process in living}
        failed = [Living(name, death.host, group[name]) for name in exited]
        hang, now = self._hangs.judge(failed, living), time.monotonic()
        if hang is None:
            return death
        if isinstance(hang, Standstill) or hang.process.name not in group:
            return replace(death, because=hang.sentence(now))
        others = tuple((name, pid) for name, pid in group.items() if name != hang.process.name)
        who = hang.process
        return Death(who.name, who.host, who.pid, None, who.rank, others, hang.about(now))


class _Chronicle:
    """Records what happens to processes, and tells the scheduler, where there is one, of those that end."""

    def __init__(self, machine: Machine, path: Path, record: Recorder) -> None:
        self._path, self._record, self._scheduler = path, record, machine.scheduler
        names = [process.name for group in machine.job.groups for process in group.processes]
        self._memory = OutOfMemory(path, sum(name.startswith(("rank", "worker")) for name in names))

    def watch(self) -> Watch:
        """Return what the supervisor calls."""
        stop = self._scheduler.stop if self._scheduler is not None else lambda: None
        return Watch(self.on_death, stop, self.on_start, say)

    def on_death(self, death: Death, goes_on: bool) -> None:
        """Record a death and what follows."""
        if death.rank is not None:
            then = "the group restarts from the newest checkpoint"
        else:
            then = "it alone is started again" if not death.others else "its worker's processes are started again"
        reason = _last_words(self._path, death)
        message = f"{death}{reason}{self._memory.about(death, reason)}; {then if goes_on else 'no restarts are left'}"
        role = death.name if death.rank is None else None
        self._record.write(WorkerDied(message, death.rank, role, death.host, death.pid, death.exit_code))
        if self._scheduler is not None:
            self._scheduler.died(death.name, "died", death.pid)
            for name, pid in death.others:
                self._scheduler.died(name, f"ended with {death.name}", pid)

    def on_start(self, started: Started) -> None:
        """Record a process that is no rank."""
        self._memory.begin(started.pid)
        if self._scheduler is not None:
            self._record.write(ProcessStarted(started.name, started.pid))

    def on_hang(self, verdict: Verdict) -> None:
        """Record who others wait for, say it, and add its stacks to its log."""
        now = time.monotonic()
        message, seconds = verdict.sentence(now), now - verdict.since_s
        seen = HangSeen(message, seconds=seconds, step=verdict.step, waiting=[str(p) for p in verdict.waiting])
        if isinstance(verdict, Hang):
            who = verdict.process
            role = None if who.rank is not None else who.name
            seen = replace(seen, rank=who.rank, role=role, host=who.host, pid=who.pid)
            seen = replace(seen, activity=verdict.activity, line=verdict.line)
            self._log(who, f"{message}\n{verdict.stack or ''}\n")
        self._record.write(seen)
        say(message)

    def on_slow(self, slow: Slow) -> None:
        """Record who makes the others wait, and say it."""
        message, who = slow.sentence(), slow.process
        role = None if who.rank is not None else who.name
        seen = SlowProcess(message, who.rank, role, who.host, who.pid, slow.activity, slow.step_s, slow.step, slow.line)
        self._record.write(seen)
        say(message)

    def _log(self, who: Living, text: str) -> None:
        name = who.name if who.rank is None else f"rank{who.rank}"
        try:
            with (self._path / "logs" / f"{name}.log").open("a") as log:
                log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} HANG {text}")
        except OSError as error:  # the sentence is recorded: training does not end for want of a log
            logging.warning("the stacks of %s cannot be written: %s", who, error)


def _last_words(path: Path, death: Death) -> str:
    """Return what a failed process said, or what another said that waited in vain for a silent one."""
    if death.exit_code is not None and death.exit_code < 0:
        return ""
    since_start = takewhile(lambda record: not isinstance(record, Start), newest(path, RankFailed, RoleFailed, Start))
    failures = [record for record in since_start if isinstance(record, RankFailed | RoleFailed)]
    if death.exit_code is None:
        rank = next((f for f in failures if isinstance(f, RankFailed)), None)
        return f"; rank {rank.rank} waited in vain: {rank.message}" if rank else ""
    return next((f": {f.message}" for f in failures if f.pid == death.pid), "")
