"""Who is stopped is found by its own rhythm, and a launcher that was stopped itself accuses nobody."""

from __future__ import annotations

import ctypes
import os
import subprocess
from dataclasses import replace

import pytest

from echelon.launch.culprit import Living
from echelon.launch.hangs import SilenceWatch
from echelon.launch.process import is_debugged, is_stopped
from echelon.observe.notes import Note
from echelon.observe.phases import Phase

RANK = Living("rank1", "here", 7, 1)
NOTE = Note(Phase.FORWARD, 12, 0.0, 40, 7, 0, True, False)


def found_at(longest_s: float, looks: list[float], most_s: float = 60.0) -> list[float]:
    """Return the times of those looks at a stopped process at which it is found."""
    watch = SilenceWatch(lambda name: True, most_s)
    return [now for now in looks if watch.look([RANK], lambda p: NOTE, {"rank1": longest_s}, now)]


def every(step_s: float, begin: float, end: float) -> list[float]:
    return [begin + i * step_s for i in range(int((end - begin) / step_s))]


def test_the_deadline_follows_from_the_longest_activity() -> None:
    assert found_at(0.5, every(0.5, 100.0, 110.0))[0] == 102.0
    assert found_at(2.0, every(0.5, 100.0, 110.0))[0] == 106.0
    assert found_at(40.0, every(0.5, 100.0, 110.0), most_s=5.0)[0] == 105.0


def test_who_has_not_trained_yet_is_not_judged() -> None:
    assert not found_at(0.0, every(0.5, 100.0, 110.0))


def test_time_in_which_nobody_looked_does_not_count() -> None:
    assert found_at(0.5, [100.0, 100.5, 160.0, 160.5, 161.0]) == []


def test_who_goes_on_is_judged_anew() -> None:
    stopped = True
    watch = SilenceWatch(lambda name: stopped, 60.0)
    for now in every(0.5, 100.0, 102.0):
        assert not watch.look([RANK], lambda p: NOTE, {"rank1": 0.5}, now)
    stopped = False
    watch.look([RANK], lambda p: NOTE, {"rank1": 0.5}, 102.0)
    stopped = True
    assert not watch.look([RANK], lambda p: NOTE, {"rank1": 0.5}, 102.5)


def test_its_words_say_what_it_was_at() -> None:
    watch = SilenceWatch(lambda name: True, 60.0)
    hangs = [
        hang for now in every(0.5, 100.0, 102.6) for hang in watch.look([RANK], lambda p: NOTE, {"rank1": 0.5}, now)
    ]
    assert hangs[0].in_words("2 s") == (
        "does not answer: its process has been stopped (SIGSTOP) for 2 s, in forward (model code), at step 12"
    )


def test_who_is_looked_at_with_a_debugger_is_not_judged() -> None:
    attach, detach = 16, 17  # ptrace(2)
    libc = ctypes.CDLL(None, use_errno=True)
    with subprocess.Popen(["sleep", "60"]) as process:
        try:
            if libc.ptrace(attach, process.pid, None, None) != 0:
                pytest.skip(f"no debugger may be used here: {os.strerror(ctypes.get_errno())}")
            os.waitpid(process.pid, os.WUNTRACED)
            watch, rank = SilenceWatch(lambda name: is_stopped(process.pid), 60.0), replace(RANK, pid=process.pid)
            assert is_stopped(process.pid) and is_debugged(process.pid)
            for now in every(0.5, 100.0, 110.0):
                assert not watch.look([rank], lambda p: NOTE, {"rank1": 0.5}, now)
            libc.ptrace(detach, process.pid, None, None)
        finally:
            process.kill()
