"""Watches for processes that others wait for, and names them: while they hang, and when a waiting one has given up."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from echelon.core.units import format_seconds
from echelon.launch.culprit import (
    Elsewhere,
    Hang,
    Living,
    Observed,
    Standstill,
    StuckLoader,
    find_hang,
    find_standstill,
)
from echelon.launch.noticeboard import NoticeBoard
from echelon.launch.places.base import Place, Restart
from echelon.launch.process import is_debugged, is_stopped
from echelon.launch.rhythm import (
    HANGS_LEAST_S,
    LOOK_S,
    SHARE_OF_DEADLINE,
    Rhythm,
    find_late,
    main_thread,
    may_take_long,
)
from echelon.launch.slow import Slow, SlowWatch
from echelon.observe.notes import ASK_SIGNAL, STACK_SIGNAL, Note
from echelon.observe.phases import Phase
from echelon.observe.stacks import Stack, stack_of
from echelon.observe.tcp import tcp_state

AGAIN_S = 2.0  # between closer looks at who is late
STACKS_S = 0.5  # how long stacks are waited for
ANSWER_S = 0.2  # in which who runs Python answers, if it gets a processor
RUNS_S = 0.02  # of the processor: a thread that runs Python answers in less
LEAVE_S = 1.5  # a process whose peer is gone notices in this time
STILL_S = 1.0  # who changed its activity more recently does not hang, when a wait has ended already
SILENCE_LOOK_S = 0.25
SILENT_LEAST_S = 2.0
SILENT_TIMES_LONGEST = 3.0


Verdict = Hang | Standstill


class Others(Protocol):
    """The other machines of a run."""

    def share(self, observed: Sequence[Observed]) -> None:
        """Tell the machine that judges what this one's processes are at."""

    def elsewhere(self) -> Elsewhere:
        """Return what the processes of the others are at, as far as they have told."""


class NoOthers:
    """A run on one machine, or one whose machines judge each for themselves."""

    def share(self, observed: Sequence[Observed]) -> None:
        """Do nothing."""

    def elsewhere(self) -> Elsewhere:
        """Return nothing, which is all."""
        return Elsewhere()


class HangListener(Protocol):
    """Who is told."""

    def on_hang(self, verdict: Verdict) -> None:
        """Hear of a hang or a standstill."""

    def on_slow(self, slow: Slow) -> None:
        """Hear of a process that makes the others wait."""


@dataclass(frozen=True)
class _Idle:
    """An idle process that all others wait for, while its stack does not change.

    Attributes:
        began_s, seen_s: for how long its activity had been looked at, when it was first seen so and at the last look.
    """

    pid: int
    changes: int
    stack: Stack | None
    began_s: float
    seen_s: float

    @classmethod
    def since(cls, before: _Idle | None, hang: Hang, seen_s: float) -> _Idle:
        """Return what is seen now; `before`: at the last look."""
        now = cls(hang.process.pid, hang.changes, hang.stack, seen_s, seen_s)
        if before is None or replace(before, began_s=seen_s, seen_s=seen_s) != now:
            return now
        return replace(before, seen_s=seen_s)

    @property
    def is_sure(self) -> bool:
        """Whether it does not go on: what it is in is known, and has not changed for 10 s."""
        return self.stack is not None and self.seen_s - self.began_s >= HANGS_LEAST_S


class HangWatch:
    """Follows the notes of a job's processes.

    A process hangs when its activity has not changed for half of the deadline that others wait for, and others wait.
    It is told then, once, with its stack, while nobody has given up yet.

    Who restarts alone and hangs in a step for nine tenths of the deadline is killed. So is who has others that go on
    without it, or save what they have, if all of them wait for it. These are spared the wait where it is sure: who is
    stopped is killed by a deadline of its own rhythm (`SilenceWatch`), who turns in a loop after half of the deadline
    (`Rhythm.is_late`), and who is idle once its stack has not changed for 10 s (`Rhythm.is_idle`).
    """

    def __init__(
        self,
        board: NoticeBoard,
        place: Place,
        others: Others,
        deadline_s: float,
        listener: HangListener,
        restart: Restart,
    ) -> None:
        """Prepare.

        Args:
            board: where the processes write.
            others: the other machines.
            deadline_s: how long one waits for another.
            listener: is told.
            restart: what follows when one of those that train is killed.
        """
        self._board, self._place, self._others, self._listener = board, place, others, listener
        self._deadline_s, self._survivors_act = deadline_s, restart in (Restart.BESIDE, Restart.RESCUED)
        self._is_independent = restart is Restart.ALONE
        self._slow = SlowWatch(independent=self._is_independent)
        self._silence = SilenceWatch(place.is_silent, deadline_s) if self._survivors_act else None
        self._verdict: Verdict | None = None
        self._ended: dict[int, str] = {}  # by pid: why we killed it
        self._rhythms: dict[str, Rhythm] = {}
        self._idle: _Idle | None = None
        self._next_s = self._next_rhythm_s = self._next_late_s = 0.0

    def look(self, living: Sequence[Living]) -> None:
        """Look at what all processes are at; called again and again."""
        now = time.monotonic()
        self._end_silent(living, now)
        self._follow_rhythms(living, now)
        self._end_late(living, now)
        if now < self._next_s:
            return
        self._next_s = now + LOOK_S
        self._look_for_slow(living, now)
        verdict = self._verdict
        if verdict is not None and not self._goes_on(verdict, living):
            self._verdict = None
        elif isinstance(verdict, Hang) and self._is_over(verdict, living, now):
            self._end(verdict, now)
        if self._verdict is None and self._is_suspicious(living, now):
            self._next_s = now + self._deadline_s / 10  # stacks are not asked for at every look
            self._look_closely(self._observe(living))
        elif self._verdict is None and living:  # else those that others failed for may have just been ended
            self._others.share(())  # what was told before is over

    def _end_silent(self, living: Sequence[Living], now: float) -> None:
        """End who is stopped for too long, where the others go on without it."""
        if self._silence is not None:
            longest_s = {name: rhythm.longest_s for name, rhythm in self._rhythms.items()}
            for hang in self._silence.look(living, lambda p: self._board.note(p.name, p.pid), longest_s, now):
                self._end(hang, now)

    def _end_late(self, living: Sequence[Living], now: float) -> None:
        """End who never comes back from a part of its step, where all others wait for it and go on without it."""
        if not self._survivors_act or now < self._next_late_s:
            return
        rhythms = {p.name: self._rhythms[p.name] for p in living if p.name in self._rhythms}
        late = {name for name, rhythm in rhythms.items() if rhythm.is_late(self._deadline_s)}
        judged = {p.name for p in living if not is_debugged(p.pid) and p.pid not in self._ended}
        suspects = judged & (late | {name for name, rhythm in rhythms.items() if rhythm.is_idle})
        elsewhere = self._others.elsewhere()
        if not suspects or not elsewhere.is_complete:  # others, of whom nothing is known, may be as slow
            return
        self._next_late_s = now + AGAIN_S
        observed, now = [*self._observe(living), *elsewhere.observed], time.monotonic()
        hang = find_late(observed, suspects, now, min(HANGS_LEAST_S, self._deadline_s) / 2)
        before, self._idle = self._idle, None
        if hang is None:
            return
        if hang.process.name not in late:
            self._idle = _Idle.since(before, hang, rhythms[hang.process.name].seen_s)
            if not self._idle.is_sure:
                return
        self._take_up(hang)
        self._end(hang, now)

    def _is_over(self, hang: Hang, living: Sequence[Living], now: float) -> bool:
        """Whether a process that restarts alone, on this machine, has hung in a step for long enough."""
        if not (self._is_independent and hang.is_in_step and hang.process in living) or may_take_long(hang.stack):
            return False
        return now - hang.since_s > SHARE_OF_DEADLINE * self._deadline_s

    def _look_closely(self, here: list[Observed]) -> None:
        """Judge by what this machine's processes are at and what others have told of theirs; tell them as well."""
        self._others.share(here)
        elsewhere, now, still_s = self._others.elsewhere(), time.monotonic(), self._deadline_s / 2
        observed = [*here, *elsewhere.observed]
        verdict: Verdict | None = find_hang(observed, now, still_s, self._is_independent)
        if verdict is None and elsewhere.is_complete:
            verdict = find_standstill(observed, now, still_s)
        self._take_up(verdict)

    def _follow_rhythms(self, living: Sequence[Living], now: float) -> None:
        """Note how long activities take."""
        if now < self._next_rhythm_s:
            return
        self._next_rhythm_s = now + LOOK_S
        for process in living:
            note, before = self._board.note(process.name, process.pid), self._rhythms.get(process.name)
            if note is None:
                continue
            if before is None or before.pid != note.pid:
                self._rhythms[process.name] = Rhythm.begin(note, now)
            else:
                before.go_on(note, now)

    def _look_for_slow(self, living: Sequence[Living], now: float) -> None:
        notes = {p.name: note for p in living if (note := self._board.note(p.name, p.pid)) is not None}
        if self._verdict is None and self._slow.wants_look(notes, now):
            slow = self._slow.looked(self._observe(living), now)
            if slow is not None:
                self._listener.on_slow(slow)

    def _is_suspicious(self, living: Sequence[Living], now: float) -> bool:
        """Whether a process that seems not to wait has been in the same activity for long."""
        notes = [note for p in living if (note := self._board.note(p.name, p.pid)) is not None]
        return any(now - note.since_s > self._deadline_s / 2 for note in notes)

    def _goes_on(self, verdict: Verdict, living: Sequence[Living]) -> bool:
        """Whether those that a verdict is about have done nothing since."""
        before = [(verdict.process, verdict.changes)] if isinstance(verdict, Hang) else verdict.changes
        elsewhere = {o.process: o.note.changes for o in self._others.elsewhere().observed}
        notes = {p: note for p in living if (note := self._board.note(p.name, p.pid)) is not None}
        now = {**elsewhere, **{process: note.changes for process, note in notes.items()}}
        return all(now.get(process) == changes for process, changes in before)

    def _take_up(self, verdict: Verdict | None) -> None:
        if verdict is not None:
            self._verdict = verdict
            self._listener.on_hang(verdict)

    def _end(self, hang: Hang, now: float) -> None:
        self._ended[hang.process.pid] = hang.in_words(format_seconds(now - hang.since_s))
        self._place.signal([hang.process.name], signal.SIGKILL)

    def ended(self, pid: int) -> str:
        """Return why a process was killed by this watch; empty: it was not."""
        return self._ended.get(pid, "")

    def judge(self, failed: Sequence[Living], living: Sequence[Living]) -> Verdict | None:
        """Return who hangs, or that nobody does, while others have failed because they waited in vain.

        None: nothing is known of it.

        Those that live may be on their way out for the same reason: they have a moment.
        """
        if self._verdict is not None and self._goes_on(self._verdict, living):
            return self._verdict
        notes = [self._board.note(p.name, p.pid) for p in failed]
        if not any(note is not None and note.failed for note in notes):
            return None
        ends = time.monotonic() + LEAVE_S
        while time.monotonic() < ends:
            left = [p for p in living if _runs(p.pid)]
            if not left:
                return None
            time.sleep(0.05)
        hang = find_hang([*self._observe(left), *self._waited(failed)], time.monotonic(), STILL_S)
        self._take_up(hang)
        return hang

    def _waited(self, failed: Sequence[Living]) -> list[Observed]:
        """Return those that failed as if they still waited."""
        now = time.monotonic()
        return [
            Observed(p, note, now - note.since_s + STILL_S)
            for p in failed
            if (note := self._board.note(p.name, p.pid)) is not None and note.failed
        ]

    def _observe(self, living: Sequence[Living]) -> list[Observed]:
        """Ask all processes for their stacks, and return what they are at."""
        noted = [(p, note) for p in living if (note := self._board.note(p.name, p.pid)) is not None]
        stopped = {p.name for p, _ in noted if self._place.is_silent(p.name)}
        # By its name a signal would reach the next start of one that has just died, which has no handler yet.
        asked = [p for p, note in noted if note.answers and p.name not in stopped and _runs(p.pid)]
        for process in asked:
            self._board.clear_stacks(process.name)
        before = {p.name: main_thread(p.pid)[1] for p in asked}
        self._place.signal([p.name for p in asked], ASK_SIGNAL)
        silent = self._silent([p.name for p in asked])
        outside = [p for p in asked if p.name in silent and _is_outside_python(p.pid, before[p.name])]
        self._place.signal([p.name for p in outside], STACK_SIGNAL)
        dumps = {p.name: self._settled(p.name, 0) for p in asked if p.name not in silent or p in outside}
        now = time.monotonic()
        return [
            Observed(
                p, note, now - note.since_s, stack_of(dumps.get(p.name, ""), note.thread), p.name in stopped,
                self._stuck_loader(p, note.thread) if note.activity == Phase.DATA else None, tcp_state(p.pid),
                self._rhythms[p.name].longest_s if p.name in self._rhythms else 0.0,
            )
            for p, note in noted
        ]  # fmt: skip

    def _silent(self, names: Sequence[str], begin: int = 0) -> set[str]:
        """Wait for a moment until processes have answered, beyond a number of characters; returns who has not."""
        ends = time.monotonic() + ANSWER_S
        while True:
            silent = {name for name in names if len(self._board.stacks(name)) <= begin}
            if not silent or time.monotonic() > ends:
                return silent
            time.sleep(0.02)

    def _settled(self, name: str, begin: int) -> str:
        """Wait until a process has written its stacks, beyond a number of characters; returns them."""
        ends, before = time.monotonic() + STACKS_S, ""
        while time.monotonic() < ends:
            time.sleep(0.02)
            text = self._board.stacks(name)[begin:]
            if text and text == before:
                break
            before = text
        return before

    def _stuck_loader(self, process: Living, thread: int) -> StuckLoader | None:
        """Return the loader process of a rank that does not wait for work, if one is there.

        It is a fork of the rank, so it answers the same signals into the same memory.
        """
        for pid in _children(process.pid):
            if is_stopped(pid):
                return StuckLoader(pid, None)
            if not _answers(pid):
                continue
            begin, used_s = len(self._board.stacks(process.name)), main_thread(pid)[1]
            os.kill(pid, ASK_SIGNAL)
            if self._silent([process.name], begin) and _is_outside_python(pid, used_s):
                os.kill(pid, STACK_SIGNAL)
            stack = stack_of(self._settled(process.name, begin), thread)
            if stack is not None and not _is_idle(stack):
                return StuckLoader(pid, stack)
        return None


def _is_idle(stack: Stack) -> bool:
    """Whether a loader process waits for what to load."""
    return stack.telling is not None and stack.telling.file.endswith("/echelon/data/process.py")


def _children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:  # it has ended, or this kernel does not tell
        return []


def _is_outside_python(pid: int, used_s: float) -> bool:
    """Whether the main thread of a process that was asked for its stack, and is silent, is in other code than Python.

    It sleeps, or runs: in Python it would have answered. Who has not got a processor since may be in either.

    Args:
        used_s: the processor time that it had used before.
    """
    state, now_s = main_thread(pid)
    return state == "S" or (state != "" and now_s - used_s >= RUNS_S)


def _answers(pid: int) -> bool:
    """Whether a process handles the signals that ask for stacks, which would else end it."""
    try:
        caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    except OSError:
        return False
    handled = int(caught[1], 16) if caught is not None else 0
    return all(handled >> (signum - 1) & 1 for signum in (ASK_SIGNAL, STACK_SIGNAL))


def _runs(pid: int) -> bool:
    """Whether a process has not ended; one that nobody has waited for yet has."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][:1] not in ("Z", "X", "")
    except OSError:
        return False


class SilenceWatch:
    """Finds processes that have been stopped for longer than their own rhythm allows.

    What counts is how long this watch has seen a process stopped, not how old its last note is: where a terminal stops
    the whole job and lets it go on, the launcher may wake first.
    """

    def __init__(self, is_silent: Callable[[str], bool], most_s: float) -> None:
        """Prepare.

        Args:
            is_silent: whether a process, by its name, lives but does not run.
            most_s: for how long one waits at most, however slow the steps are.
        """
        self._is_silent, self._most_s = is_silent, most_s
        self._since_s: dict[tuple[str, int], float] = {}  # by name and pid: when it was first seen stopped
        self._looked_s = 0.0

    def look(
        self,
        living: Sequence[Living],
        note_of: Callable[[Living], Note | None],
        longest_s: dict[str, float],
        now: float,
    ) -> list[Hang]:
        """Return who has been stopped for longer than three times the longest of its activities, and than 2 s.

        Who looks at a process with a debugger has the time of --timeout.

        Args:
            living: all processes that run.
            note_of: returns what a process wrote last.
            longest_s: by name, the longest activity of its steps so far; who has none yet is not judged.
            now: by `time.monotonic`; looks that follow the last one in less than 0.25 s do nothing.
        """
        if now - self._looked_s < SILENCE_LOOK_S:
            return []
        if now - self._looked_s > SILENT_LEAST_S / 2:  # nobody has looked: this process may have been stopped as well
            self._since_s.clear()
        self._looked_s = now
        stopped = {(p.name, p.pid): p for p in living if self._is_silent(p.name) and not is_debugged(p.pid)}
        self._since_s = {key: self._since_s.get(key, now) for key in stopped}
        found = []
        for key, process in stopped.items():
            note, longest, still_s = note_of(process), longest_s.get(process.name, 0.0), now - self._since_s[key]
            if note is None or not longest or still_s < self._deadline_s(longest):
                continue
            hang = find_hang([Observed(process, note, still_s, is_stopped=True)], now, 0.0)
            found += [hang] if hang is not None else []
        return found

    def _deadline_s(self, longest_s: float) -> float:
        return min(max(SILENT_LEAST_S, SILENT_TIMES_LONGEST * longest_s), self._most_s)
