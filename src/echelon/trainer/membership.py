"""This process among the members of a run whose survivors go on: which term it is in, and when that ends.

Where members are lost, or have left for a newer term, what waits for them in a collective gets an error, for their
connections end, and finds out why (see `elastic.py`). Where it does not within half a second, a thread breaks the
connections of this process's group. Newcomers alone are let in between two steps.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import cast

import torch.distributed as dist

from echelon.collectives.meeting_store import MeetingStore
from echelon.core.listeners import break_off, connections
from echelon.core.terms import MEMBER_VARIABLE, TERMS_VARIABLE, Term, TermFolder, is_elsewhere, is_newcomer
from echelon.trainer.process import is_lost_wait

LOOK_S = 0.25  # between looks for a newer term while this process trains; a look takes some 0.1 ms
_POLL_S = 0.002  # while it waits for one
_IDLE = 0.02  # processor seconds a second: a main thread that uses less only waits
_LATE_S = 0.5  # a look that comes so late says that the machine is busy, not that this process waits
_NOTICE_S = 0.5  # in which a collective notices that others are gone, whose connections end with them
_STUCK_S = 3.0  # in which a collective notices that its connections are broken
_WAIT_LOOK_S = 0.02  # between looks whether the term is over, of who waits in its store
_OWN = Path(__file__).parents[1].as_posix() + "/"
_ALONE = tuple(_OWN + part for part in ("data/", "checkpoint/", "records/", "core/files.py", "core/patience.py"))
"""Code that waits for disks, not for others."""
_STDLIB = Path(threading.__file__).parent.as_posix() + "/"
_ENTER_S = 10.0  # in which all members of a term enter it, or one of them is found dead


class TermOver(RuntimeError):
    """A newer term has begun: those of this one wait for each other no more."""


class Membership:
    """Which term this process is in.

    Attributes:
        member: its name among members.
        is_newcomer: it was started beside a run that goes on, and has not taken part yet.
        has_begun: it has said that it can go on without others.
        has_news: since its term began, something was said that may concern it: others have come or gone, or it may
            leave. A thread looks for this, as files are too slow for each step.
    """

    has_begun = has_news = False

    def __init__(self, folder: TermFolder, member: str, timeout_s: float) -> None:
        """Begin in the first term, or in none as a newcomer.

        Args:
            timeout_s: how long a broken connection's cause is waited for.
        """
        self._folder, self.member, self._timeout_s = folder, member, timeout_s
        self.is_newcomer = is_newcomer(member)
        self._term = 0
        self._connections: dict[int, int] = {}
        self._before: dict[int, int] | None = None  # while connections are made
        self._stamp, self._must = 0, False  # of the folder at the last look, and whether this term was over then
        self._is_between = False  # two terms: it waits for nobody of the one before
        self._lock = threading.Lock()
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._look, name="echelon-terms", daemon=True)

    @classmethod
    def from_environment(cls, timeout_s: float) -> Membership | None:
        """Return the membership that this process was started for, if there is one."""
        folder, member = os.environ.get(TERMS_VARIABLE, ""), os.environ.get(MEMBER_VARIABLE, "")
        return cls(TermFolder(Path(folder)), member, timeout_s) if folder and member else None

    @contextmanager
    def connecting(self) -> Iterator[None]:
        """Surround the making of a group's connections: they are broken when the term ends."""
        with self._lock:
            self._before = connections()
        if self._thread.ident is None:
            self._thread.start()
        try:
            yield
        finally:
            with self._lock:
                before, self._before = self._before or {}, None
                made = {fd: node for fd, node in connections().items() if before.get(fd) != node}
                self._connections = {**self._connections, **made}

    def begin(self) -> None:
        """Say that this process can go on without others from now on."""
        self._folder.begin(self.member)
        self.has_begun = True

    def agree(self) -> None:
        """Say that this process has what the others have trained."""
        self._folder.agree(self.member)

    def concerns(self, error: BaseException) -> bool:
        """Whether an error is of a lost connection, or of a term that is over."""
        return isinstance(error, TermOver) or is_lost_wait(error) or self.is_over()

    def leave(self) -> None:
        """Break the connections of the term that this process is in."""
        with self._lock:
            self._break()

    def _break(self) -> None:
        broken = dict(self._connections)
        if (before := self._before) is not None:
            broken |= {fd: node for fd, node in connections().items() if before.get(fd) != node}
        break_off(broken)

    def next_term(self) -> Term:
        """Wait for a newer term with this member in it, and for all of its members to enter it.

        Raises:
            TimeoutError: there is none, or they do not.
        """
        ends = time.monotonic() + self._timeout_s
        if self.is_newcomer and not self._term:
            self._folder.arrive(self.member)
            ends = float("inf")  # the supervisor ends it
        elif not self.is_over():
            self._folder.complain(self._term, self.member)
        self._is_between = True
        try:
            return self._entered(ends)
        finally:
            self._is_between = False

    def _entered(self, ends: float) -> Term:
        while True:
            term = self._folder.newest()
            if term is not None and term.number > self._term:
                if self.member in term.members:
                    with self._lock:
                        self._term, self._connections = term.number, {}
                        self._stamp, self._must, self.has_news = 0, False, False
                    if self._all_enter(term):
                        return term
                    continue
                if not term.members:  # more than half of the machines that may lead are lost: their commands wait, too
                    ends = float("inf")
            if time.monotonic() > ends:
                raise TimeoutError(f"{self.member} lost its peers, and nobody said for {self._timeout_s:g} s who left")
            time.sleep(_POLL_S)

    @property
    def term(self) -> int:
        """The number of the term that this process is in."""
        return self._term

    def led_by(self, term: Term, meeting: MeetingStore | None) -> MeetingStore | None:
        """Return the store of the machine that leads in a term, where there are several."""
        if meeting is None or not term.store or term.store == meeting.address:
            return meeting
        return meeting.elsewhere(term.store, self.check_term)

    def meeting_of(self, term: Term, meeting: dist.Store | None) -> dist.Store:
        """Return where the members of a term find each other; `meeting`: of several machines, None of one."""
        if meeting is not None:
            return dist.PrefixStore(f"term{term.number}", meeting)
        return dist.FileStore(str(self._folder.store(term)), len(term.members))

    def waits_for_word(self) -> bool:
        """Whether a signal does not stop the run yet: a machine's command decides what follows from one to all of its
        processes, and says so.
        """
        return self._folder.is_shared and is_elsewhere(self.member) and not self._folder.is_stopping

    def may_leave(self) -> bool:
        """Whether this process was asked to leave after the step under way."""
        return self._folder.may_leave(self.member)

    def close(self) -> bool:
        """Say that all is trained, so that nobody is taken in any more; returns whether nobody was just before.

        Then this process looks no more; else a term has begun that all its members have to enter.

        Raises:
            TimeoutError: the first of several machines, which is asked, does not answer.
        """
        ends = time.monotonic() + max(self._timeout_s, _ENTER_S)
        while (closed := self._folder.close(self._term)) is None:
            if time.monotonic() > ends:
                raise TimeoutError(f"the first machine did not say for {self._timeout_s:g} s whether others come")
            time.sleep(_POLL_S)
        if not closed:
            return False
        self._ends.set()
        return True

    def stop(self) -> None:
        """Look no more, whoever is taken in."""
        self._folder.close(None)
        self._ends.set()

    def _all_enter(self, term: Term) -> bool:
        """Wait for the others; returns False where a newer term came first.

        Raises:
            TimeoutError: one of them does not enter, nor die.
        """
        self._folder.enter(term, self.member)
        complains_at = time.monotonic() + min(self._timeout_s / 2, _ENTER_S)  # who is stopped is ended then
        ends = time.monotonic() + max(self._timeout_s, _ENTER_S)
        while missing := self._folder.missing(term):
            if self.is_over():
                return False
            if time.monotonic() > complains_at:
                self._folder.complain(term.number, self.member)
                complains_at = ends
            if time.monotonic() > ends:
                raise TimeoutError(f"{', '.join(missing)} did not enter term {term.number}")
            time.sleep(_POLL_S)
        return True

    def is_over(self) -> bool:
        """Whether a newer term than that of this process has begun."""
        term = self._folder.newest()
        return term is not None and term.number > self._term

    def must_leave(self) -> bool:
        """Whether a newer term has begun without some of this one's members: they are lost, or have left for it."""
        term = self._folder.newest()
        if term is None or term.number <= self._term:
            return False
        return term.lost_by > self._term or self._folder.has_begun_term(term)

    def _hear(self) -> bool:
        """Look for what was said since the last look; returns whether this process must leave its term."""
        stamp = self._folder.stamp()
        if not stamp or stamp != self._stamp:
            self._stamp, self._must = stamp, self.must_leave()
            self.has_news = self.is_over() or self.may_leave()
        return self._must

    def check_term(self) -> None:
        """Look whether the members of this process's term can still meet.

        Raises:
            TermOver: they cannot.
        """
        if self.must_leave():
            raise TermOver("others were lost, or have left, before all were connected")

    def _look(self) -> None:
        # gloo's own thread may turn around a broken connection that it cannot handle: the process's time would hide it.
        trains = time.pthread_getcpuclockid(cast(int, threading.main_thread().ident))
        looked_s = still_s = time.monotonic()
        used_s, notices_by_s = time.clock_gettime(trains), 0.0
        while not self._ends.wait(LOOK_S):
            with self._lock:
                must = self._hear()
                notices_by_s = (notices_by_s or time.monotonic() + _NOTICE_S) if must else 0.0
                over = must and time.monotonic() > notices_by_s
                if over:
                    self._break()  # again and again: connections may be under way
            now_s, now_used_s = time.monotonic(), time.clock_gettime(trains)
            late, looked_s = now_s - looked_s > _LATE_S, now_s
            is_busy = now_used_s - used_s > _IDLE * (now_s - still_s)
            # Who is alone is in no collective, nor who waits for a term, or for data, or is in code of the user's.
            may_be_stuck = over and not late and not is_busy and bool(self._connections) and not self._is_between
            if not may_be_stuck or not _waits_for_others(_main_frame()):
                still_s, used_s = now_s, now_used_s
            elif now_s - still_s > _STUCK_S:
                where = "".join(traceback.format_stack(_main_frame()))
                logging.error(
                    "a collective does not notice that its connections are broken: this process ends\n%s", where
                )
                logging.shutdown()
                os.kill(os.getpid(), signal.SIGKILL)  # the others go on, and it joins them again


def _main_frame() -> FrameType | None:
    return sys._current_frames().get(cast(int, threading.main_thread().ident))


def _waits_for_others(frame: FrameType | None) -> bool:
    """Whether a thread whose innermost frame this is may be in a collective, or wait for one."""
    while frame is not None:
        file = Path(frame.f_code.co_filename).as_posix()
        if "/torch/distributed/" in file or "/torch/autograd/" in file:
            return True
        if file.startswith(_OWN):
            return not file.startswith(_ALONE)
        if not file.startswith(_STDLIB) or "/site-packages/" in file:
            return False
        frame = frame.f_back
    return False


class TermStore(dist.Store):
    """A `torch.distributed` store that is another one, but for waits: these end with what `check_term` raises.

    Keep a reference to it for as long as a process group uses it: torch holds the C++ half alone.
    """

    def __init__(self, store: dist.Store, check_term: Callable[[], None], timeout: timedelta) -> None:
        """Take the store, and what raises an error once members are lost that would be waited for."""
        super().__init__()
        self._store, self._check_term, self._timeout = store, check_term, timeout

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        self._store.set(key, value)  # type: ignore[arg-type]

    def get(self, key: str) -> bytes:
        """Return a key's value, once it is there; raises what `wait` does."""
        self.wait([key])
        return self._store.get(key)

    def add(self, key: str, value: int) -> int:
        """Add to a key's number, 0 if it has none; returns the sum."""
        return self._store.add(key, value)

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        """Set a key if it has the expected value, or that is empty and it has none; returns what it has then."""
        return self._store.compare_set(key, expected_value, desired_value)  # type: ignore[arg-type]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        return self._store.check(list(keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until all keys are there.

        Raises:
            DistStoreError: they were not, in time: one that is stopped, or so, is lost to this process.
        """
        limit = timeout or self._timeout
        began = looked = time.monotonic()
        while not self.check(keys):
            now = time.monotonic()
            if now - looked > _WAIT_LOOK_S:
                self._check_term()
                looked = now
            if now - began > limit.total_seconds():
                raise dist.DistStoreError(f"no member has set {', '.join(keys)} within {limit.total_seconds():g} s")
            time.sleep(_POLL_S)

    def delete_key(self, key: str) -> bool:
        """Remove a key; returns whether it was there."""
        return self._store.delete_key(key)

    def num_keys(self) -> int:
        """Count the keys."""
        return self._store.num_keys()

    deleteKey, getNumKeys = delete_key, num_keys

    def set_timeout(self, timeout: timedelta) -> None:
        """Change how long `get` and `wait` wait."""
        self._timeout = timeout

    def clone(self) -> TermStore:
        """Return this store."""
        return self
