"""What is recorded of the processes of a run: deaths with their reasons, and hangs with who is to blame."""

from __future__ import annotations

import logging
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.core.patience import may_pass
from echelon.core.stop import signal_name
from echelon.launch.changes import Change, Requests
from echelon.launch.culprit import Hang, Living, Standstill
from echelon.launch.hangs import HangWatch, NoOthers, Verdict
from echelon.launch.logs import LogLimit
from echelon.launch.noticeboard import NoticeBoard
from echelon.launch.places.base import Job, Place, Process, Restart, Started
from echelon.launch.plan import visible_gpus
from echelon.launch.rounds import DEATH, LEAVE, STOP, Loss
from echelon.launch.slow import Slow
from echelon.launch.supervisor import Aftermath, Death, Remedy, Watch
from echelon.observe.oom import OUT_OF_MEMORY
from echelon.records.events import (
    ChangeRefused,
    Event,
    HangSeen,
    RankFailed,
    RoleFailed,
    SlowProcess,
    WorkerDied,
    WorkerLeft,
)
from echelon.records.file import Recorder, newest
from echelon.records.kinds import ProcessStarted, Start, Steps
from echelon.run.job import another_worker
from echelon.run.machine import Machine, say
from echelon.run.micro_batches import Halving
from echelon.run.notify import Notifier
from echelon.run.opening import Opening
from echelon.run.out_of_memory import OutOfMemory
from echelon.sync.ps import server_settings

if TYPE_CHECKING:
    from echelon.launch.machines import FirstMachine, OtherMachine
    from echelon.launch.voters import VoterMachine
    from echelon.trainer.resolved import ResolvedRun

_LOOK_BACK_S = 300.0
_ADDRESS = re.compile(r"0x[0-9a-f]+")  # of an object, in an error's message: another one in each process


class Trained:
    """Whether a process that this command started has finished a step, whatever became of it: true or false."""

    board: NoticeBoard | None = None  # of the processes that run now, or ran last
    _has = False

    def __bool__(self) -> bool:
        self._has = self._has or (self.board is not None and self.board.has_trained())
        return self._has

    def close(self) -> None:
        """Keep what is known of the processes, whose notes go."""
        self._has, self.board = bool(self), None


@contextmanager
def watched(
    machine: Machine,
    place: Place,
    run: ResolvedRun,
    opening: Opening,
    path: Path,
    record: Recorder,
    trained: Trained,
) -> Iterator[tuple[Job, Watch]]:
    """Watch the processes of this machine; gives the job as it is to be run, and what its supervisor tells.

    Args:
        trained: is told of steps.
    """
    chronicle = _Chronicle(machine, run, path, record, opening.tells)
    logs = LogLimit(path / "logs", run.log_limit)

    def look_around() -> None:
        """See what has become too long, and whether the machine with the scheduler is there."""
        logs.look()
        if machine.scheduler is not None:
            machine.scheduler.connect()
        if machine.first is not None:
            machine.first.check()
        chronicle.look_elsewhere()

    if not hasattr(os, "memfd_create"):  # Linux alone
        yield machine.job, replace(chronicle.watch(), on_look=lambda _: look_around())
        return
    board = chronicle.board = trained.board = NoticeBoard(
        [p.name for group in machine.job.groups for p in group.processes]
    )
    try:
        others = machine.rounds or NoOthers()
        restart = Restart.ALONE if machine.scheduler is not None else machine.job.groups[0].restart
        hangs = HangWatch(board, place, others, run.timeout_s, chronicle, restart)

        def look(living: Sequence[Living]) -> None:
            """See who hangs, and what else there is to see."""
            hangs.look(living)
            bool(trained)  # before a process that ended is started again, and notes anew
            look_around()
            opening.look(living, board.note, machine.leads)

        yield (
            board.noted(machine.job),
            replace(chronicle.watch(), on_look=look, on_wait=opening.waits, explain=_Explain(hangs)),
        )
    finally:
        trained.close()
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
        return Death(who.name, who.host, who.pid, None, who.rank, others, hang.about(now), log=who.log)


class _Chronicle:
    """Records what happens to processes, and tells the scheduler, where there is one, of those that end."""

    board: NoticeBoard | None = None  # where processes note their steps

    def __init__(
        self, machine: Machine, run: ResolvedRun, path: Path, record: Recorder, tell: Callable[[str], None]
    ) -> None:
        self._path, self._record, self._scheduler, self._tell = path, record, machine.scheduler, tell
        self._notifier = Notifier(run.described.tracking.notify, path)
        beside = any(group.restart is Restart.BESIDE for group in machine.job.groups)
        ranges = machine.rounds is not None and run.nodes.least < run.nodes.most and not beside
        self._rounds, self._machines = machine.rounds, machine.rounds if ranges else None
        self._requests = Requests(path) if machine.scheduler is not None or beside or ranges else None
        self._run, self._job = run, machine.job
        self._most_restarts = run.config.launch.max_restarts
        self._saved = SavedSteps(path / "checkpoints")
        self._started_t: dict[str, float] = {}
        names = [process.name for group in machine.job.groups for process in group.processes]
        ranks = sum(name.startswith(("rank", "worker")) for name in names)
        self._workers = ranks
        self._memory, self._halving = OutOfMemory(path, ranks), Halving.of(run, ranks, path, record)

    def watch(self) -> Watch:
        """Return what the supervisor calls."""
        stop = self._scheduler.stop if self._scheduler is not None else lambda: None
        watch = Watch(self.on_death, stop, self.on_start, say, failures=self._failures)
        watch = replace(watch, saved=self._saved.count_new)
        watch = replace(
            watch,
            changes=self._changes,
            another=self._another,
            on_leave=self.on_leave,
            on_go=self.on_go,
            on_stop_here=self.on_stop_here,
            on_refused=self.on_refused,
            on_asked=self.on_asked,
        )
        return replace(watch, remedy=self._remedy)

    def _changes(self) -> Sequence[Change]:
        """Return what the supervisor is to do of what was asked for; where there is a scheduler, that one does it."""
        asked = self._requests.take() if self._requests is not None else []
        if self._machines is not None:
            for change in asked:
                self._let_machines_leave(self._machines, change)
            return ()
        if self._scheduler is None:
            return asked
        for change in asked:
            if change.workers:
                self._scheduler.drain(change.workers)
        return [Change(add=change.add) for change in asked if change.add]

    def _let_machines_leave(self, machines: FirstMachine | OtherMachine | VoterMachine, change: Change) -> None:
        """Let the machines of ranks leave, and record it."""
        who = " and ".join(change.workers)
        ranks = [int(name.removeprefix("rank")) for name in change.workers]
        if why := machines.drain(ranks) if ranks else "machines join by the run's own command":
            self._record.write(ChangeRefused(f"{who or 'nobody'} cannot {'leave' if who else 'join'}: {why}"))
            return
        words = f"{who} leaves with its machine after a checkpoint, as it was asked to; the others go on from there"
        for name, pid in zip(change.workers, change.pids, strict=False):
            self._record.write(WorkerLeft(words, name, pid=pid))
        self._tell(words)

    def _another(self, number: int) -> Process:
        """Return a worker more than this machine began with.

        Raises:
            UserError: it cannot have one.
        """
        run, config = self._run, self._run.config
        divides = not run.sync.uses_servers or server_settings(run.sync).aggregates
        gpus = visible_gpus() if config.training.device != "cpu" else 0
        batch_size = config.data.batch_size if divides else 0
        gpus = gpus if gpus >= self._workers else 0
        process = another_worker(self._job, self._path / "logs", number, batch_size, gpus)
        return process if self.board is None else self.board.add(process)

    def on_asked(self, pids: Mapping[str, int]) -> None:
        """Record, and say, that ranks of other machines were asked to leave."""
        if not pids:
            return
        words = f"{' and '.join(pids)} will leave after the step under way, as it was asked to; the others go on"
        for name, pid in pids.items():
            self._record.write(WorkerLeft(words, name, pid=pid))
        self._tell(words)

    def on_leave(self, process: Started, stay: int) -> None:
        """Record, and say, that a process has left as it was asked to."""
        who = f"process {process.pid} on {process.host}"
        go = "1 other goes on" if stay == 1 else f"{stay} others go on"
        if self._rounds is not None and not self._rounds.leads:  # who leads knows how many
            go = "the others go on"
        words = f"{who} has left after the step under way, as it was asked to; {go}"
        self._record.write(WorkerLeft(words, process.name, process.host, process.pid))
        self._tell(words)

    def on_go(self) -> None:
        """Let the first machine record that this one leaves, as a signal asked."""
        if self._rounds is not None:
            words = "its workers leave after the step under way (SIGTERM); the others go on"
            self._rounds.tell(Loss(words, LEAVE))

    def on_stop_here(self, signum: int) -> None:
        """Let the first machine record that this one was asked to stop the run."""
        if self._rounds is not None:
            self._rounds.tell(Loss(f"{signal_name(signum)}: the whole run is to stop", STOP))

    def on_refused(self, why: str) -> None:
        """Record why members stay as they are."""
        self._record.write(ChangeRefused(why))

    def on_death(self, death: Death, then: Aftermath) -> None:
        """Record a death and what follows, and say it where the run goes on: how it ends is said at its end."""
        if then.others:
            follows = then.others
        elif death.rank is not None:
            follows = "the group restarts from the newest checkpoint"
        else:
            follows = "it alone is started again" if not death.others else "its worker's processes are started again"
        reason = _last_words(self._path, death)
        reckons = self._halving is None or bool(then.no_restart)
        what = f"{death}{reason}{self._memory.about(death, reason, reckons)}"
        message = f"{what}; {then.no_restart or follows}"
        role = death.name if death.rank is None else None
        self._record.write(WorkerDied(message, death.rank, role, death.host, death.pid, death.exit_code, log=death.log))
        if then.others and self._rounds is not None:
            self._rounds.tell(Loss(message))
        if not then.no_restart:
            self._notifier.trouble(message)
            at_step = "" if "in step" in reason else self._at_step(death)
            self._tell(f"{what}{at_step}; {self._restart(death, follows, then)}")
        if self._scheduler is not None:
            self._scheduler.died(death.name, "died", death.pid)
            for name, pid in death.others:
                self._scheduler.died(name, f"ended with {death.name}", pid)

    def look_elsewhere(self) -> None:
        """Record, and say, what other machines have lost."""
        for loss in self._rounds.news() if self._rounds is not None else ():
            kinds = {LEAVE: WorkerLeft(loss.words), STOP: Event(loss.words, name="stop_asked")}
            self._record.write(kinds.get(loss.cause) or WorkerDied(loss.words))
            if loss.cause == DEATH:
                self._notifier.trouble(loss.words)
            self._tell(loss.words)

    def _at_step(self, death: Death) -> str:
        note = self.board.note(death.name, death.pid) if self.board is not None else None
        return f" at step {note.step}" if note is not None and note.step else ""

    def _restart(self, death: Death, follows: str, then: Aftermath) -> str:
        if then.others:
            pass
        elif death.rank is not None and self._saved.highest > 0:
            follows = f"the group restarts from the checkpoint of step {self._saved.highest}"
        elif death.rank is not None:
            follows = "the group restarts from the beginning: there is no checkpoint yet"
        left = then.restarts_left
        return follows if left is None else f"{follows} ({left} of {self._most_restarts} restarts left)"

    def _remedy(self, death: Death) -> Remedy:
        """Halve micro-batches, where that is asked for, if a process of a death's group ran out of memory."""
        if self._halving is None:
            return Remedy()
        pids = {death.pid, *(pid for _, pid in death.others)}
        failures = (failure for failure in _since_start(self._path) if failure.pid in pids)
        ran_out = any(failure.message.startswith(OUT_OF_MEMORY) for failure in failures)
        return self._halving.ease(death.name) if ran_out or self._memory.killed(death) else Remedy()

    def _failures(self, death: Death) -> list[str]:
        """Return error, with its step, and place in the code of a death's processes that failed by themselves.

        None where one was killed: the others may have failed because of it. Of a worker of servers, whose steps are
        not the run's, an error counts before its first step; that of a server or scheduler while the run makes none.
        """
        if death.exit_code is None or death.exit_code < 0:
            return []
        pids = {death.pid, *(pid for _, pid in death.others)}
        since = max(self._started_t.get(death.name, 0.0), time.time() - _LOOK_BACK_S)
        lately = list(takewhile(lambda record: record.t >= since, newest(self._path, RankFailed, RoleFailed, Steps)))
        makes_steps = any(isinstance(record, Steps) for record in lately)
        of_ranks = [e for e in lately if isinstance(e, RankFailed) and e.pid in pids]
        ranks = [(e.message, e.place) for e in of_ranks if e.role is None or e.steps == 0]
        roles = [(e.message, e.place) for e in lately if isinstance(e, RoleFailed) and e.pid in pids]
        failed = ranks if makes_steps else ranks + roles
        return [_ADDRESS.sub("0x", f"{message} at {place}") for message, place in failed if place]

    def on_start(self, started: Started) -> None:
        """Record a process that is no rank."""
        self._started_t[started.name] = time.time()
        self._memory.begin(started.pid)
        if self._halving is not None:
            self._halving.begin(started.name)
        if self._scheduler is not None:
            self._record.write(ProcessStarted(started.name, started.pid, started.host))

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
        try:
            with (self._path / "logs" / f"{who.log or who.name}.log").open("a") as log:
                log.write(f"{time.strftime('%Y-%m-%d %H:%M:%S')} HANG {text}")
        except OSError as error:  # the sentence is recorded: training does not end for want of a log
            logging.warning("the stacks of %s cannot be written: %s", who, error)


class SavedSteps:
    """Counts the checkpoints of a folder whose step is beyond all before.

    Attributes:
        highest: step of the newest; -1: there is none.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self.highest = folder, -1
        self.count_new()

    def count_new(self) -> int:
        """Return how many there are since the last call; none while the disk does not answer."""
        from echelon.checkpoint.files import entries

        try:
            steps = {entry.step for entry in entries(self._folder)}
        except OSError as error:
            if not may_pass(error):
                raise
            return 0
        new = [step for step in steps if step > self.highest]
        self.highest = max((self.highest, *new))
        return len(new)


def _last_words(path: Path, death: Death) -> str:
    """Return what a failed process said, or what another said that waited in vain for a silent one."""
    if death.exit_code is not None and death.exit_code < 0:
        return ""
    failures = _since_start(path)
    if death.exit_code is None:
        rank = next((f for f in failures if isinstance(f, RankFailed)), None)
        return f"; rank {rank.rank} waited in vain: {rank.message}" if rank else ""
    return next((f": {f.message}" for f in failures if f.pid == death.pid), "")


def _since_start(path: Path) -> list[RankFailed | RoleFailed]:
    """Return what processes failed with since the ranks began, the newest first."""
    since_start = takewhile(lambda record: not isinstance(record, Start), newest(path, RankFailed, RoleFailed, Start))
    return [record for record in since_start if isinstance(record, RankFailed | RoleFailed)]
