"""Who hangs while it runs is told from who is slow: by its own rhythm, by its processor time, and by who waits."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest

from echelon.launch import rhythm
from echelon.launch.culprit import Living, Observed
from echelon.launch.rhythm import HANGS_LEAST_S, Rhythm, acts, find_late, processor_s
from echelon.observe.notes import START, Note
from echelon.observe.phases import Phase
from echelon.observe.stacks import Stack, StackFrame

PID = 7


DEADLINE_S = 100.0


class Followed:
    """A process that is looked at every 0.5 s, whose processor time and threads are told here."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, finished: int = 2) -> None:
        self.now, self.looks_s, self._changes, self.finished = 1000.0, 0.5, 1, finished
        self.used_s: float | None = 0.0
        self.acts = 0.0
        monkeypatch.setattr(rhythm, "processor_s", lambda pid: self.used_s)
        monkeypatch.setattr(rhythm, "acts", lambda pid: self.acts)
        self.rhythm = Rhythm.begin(self._note(Phase.FORWARD, self.now), self.now)

    def _note(self, activity: str, since_s: float) -> Note:
        return Note(activity, 1000 + self.finished, since_s, self._changes, PID, 0, True, False, self.finished)

    def train(self, passes: int, longest_s: float) -> None:
        """Make forward passes in which it computes, one a step."""
        for _ in range(passes):
            self._changes += 1
            begun = self.now
            self.rhythm.go_on(self._note(Phase.FORWARD, begun), self.now)
            while self.now < begun + longest_s:
                self.look(Phase.FORWARD, begun, 1.0)
            self.finished += 1
        self._changes += 1

    def look(self, activity: str, begun: float, works: float) -> None:
        """Look at it after a while in which it has used some processor seconds a second."""
        self.now += self.looks_s
        self.used_s = self.used_s + works * self.looks_s if self.used_s is not None else None
        self.rhythm.go_on(self._note(activity, begun), self.now)

    def suspect_after(self, works: float, activity: str = Phase.FORWARD) -> float:
        """Return for how long it is in an activity until it is late, or idle: at most 200 s.

        Args:
            works: processor seconds a second.
        """
        begun = self.now
        self.rhythm.go_on(self._note(activity, begun), begun)
        while self.now < begun + 200.0:
            if self.rhythm.is_idle or self.rhythm.is_late(DEADLINE_S):
                return self.now - begun
            self.look(activity, begun, works)
        return float("inf")


def late_after(
    monkeypatch: pytest.MonkeyPatch, works: float, *, longest_s: float = 0.5, activity: str = Phase.FORWARD
) -> float:
    """Return after how long a process is suspected whose forward passes took some time before."""
    followed = Followed(monkeypatch)
    followed.train(8, longest_s)
    return followed.suspect_after(works, activity)


NINE_TENTHS = pytest.approx(0.9 * DEADLINE_S, abs=1.0)


def test_who_waits_for_a_lock_is_idle_after_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    assert late_after(monkeypatch, 0.0) == pytest.approx(HANGS_LEAST_S, abs=0.5)


def test_who_turns_in_a_loop_is_late_after_half_of_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rare sample may take ten times as long as all others, too."""
    assert late_after(monkeypatch, 1.0) == pytest.approx(DEADLINE_S / 2, abs=0.5)


def test_who_is_slow_in_all_its_steps_has_ten_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert late_after(monkeypatch, 0.0, longest_s=4.0) == pytest.approx(40.0, abs=1.0)
    assert late_after(monkeypatch, 1.0, longest_s=7.0) == pytest.approx(70.0, abs=1.0)


@pytest.mark.parametrize("activity", [Phase.COMMUNICATE, "evaluation", "checkpoint", Phase.OTHER, START])
def test_what_may_wait_for_something_else_is_never_late(activity: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert late_after(monkeypatch, 0.0, activity=activity) == float("inf")


def test_data_may_come_from_a_network_that_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert late_after(monkeypatch, 0.0, activity=Phase.DATA) == NINE_TENTHS


@pytest.mark.parametrize("finished", [0, 1])
def test_the_first_step_of_a_process_says_nothing_whichever_step_of_the_run_it_is(
    finished: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    followed = Followed(monkeypatch, finished=0)
    followed.train(finished, 1.0)
    assert followed.suspect_after(0.0) == NINE_TENTHS and not followed.rhythm.longest_s


def test_steps_that_were_made_between_two_looks_count(monkeypatch: pytest.MonkeyPatch) -> None:
    followed = Followed(monkeypatch, finished=0)
    followed.finished = 21
    followed.train(0, 0.0)
    assert followed.suspect_after(0.0) == pytest.approx(HANGS_LEAST_S, abs=0.5)


def test_who_gets_little_of_the_processor_is_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    assert late_after(monkeypatch, 1.5 / 70) == pytest.approx(70.0, abs=1.0)  # three times the work of its longest


def test_one_thread_that_waits_for_a_disk_at_one_look_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    followed = Followed(monkeypatch)
    followed.train(8, 0.5)
    followed.acts = float("inf")
    for _ in range(2):  # of the same forward pass
        followed.look(Phase.FORWARD, followed.now, 0.0)
    followed.acts = 0.0
    assert followed.suspect_after(0.0) == NINE_TENTHS


def test_who_is_ready_to_run_gets_no_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    followed = Followed(monkeypatch)
    followed.train(8, 0.5)
    followed.acts = 1.0
    assert followed.suspect_after(0.0) == NINE_TENTHS


def test_whose_processor_time_cannot_be_read_is_not_judged_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    followed = Followed(monkeypatch)
    followed.train(8, 0.5)
    followed.used_s = None
    assert followed.suspect_after(0.0) == NINE_TENTHS


def test_the_kernel_tells_whether_a_thread_acts() -> None:
    with subprocess.Popen([sys.executable, "-c", "print(flush=True); input()"], stdin=-1, stdout=-1) as process:
        assert process.stdout is not None
        process.stdout.readline()
        ends = time.monotonic() + 60.0
        while acts(process.pid):
            assert time.monotonic() < ends
        assert processor_s(process.pid) is not None
        process.communicate(b"\n")
    assert acts(os.getpid()) >= 1.0
    assert acts(process.pid) and processor_s(process.pid) is None  # it is gone: nothing is known


def test_time_in_which_the_launcher_was_stopped_counts_for_little(monkeypatch: pytest.MonkeyPatch) -> None:
    followed = Followed(monkeypatch)
    followed.train(8, 0.5)
    followed.looks_s = 15.0
    assert followed.suspect_after(0.0) == pytest.approx(75.0, abs=15.0)  # 2 s a look


def observed(rank: int, activity: str, *files: str, still_s: float = 11.0) -> Observed:
    frames = tuple(StackFrame(file, 1, "f") for file in files)
    note = Note(activity, 9, 0.0, 9, rank, 0, True, False)
    return Observed(Living(f"rank{rank}", "here", rank, rank), note, still_s, Stack(frames) if frames else None)


COMPILER = "/x/site-packages/torch/_dynamo/x.py"
FORWARD = observed(1, Phase.FORWARD, "/home/me/model.py")
WAITS = observed(0, Phase.COMMUNICATE, "/x/site-packages/torch/distributed/distributed_c10d.py")


def test_it_is_blamed_where_all_others_wait_for_it() -> None:
    hang = find_late([WAITS, FORWARD], {"rank1"}, 100.0, 5.0)
    assert hang is not None and hang.process.rank == 1 and [p.rank for p in hang.waiting] == [0]
    newcomer = observed(2, START, "/x/trainer/membership.py")
    assert find_late([WAITS, FORWARD, newcomer], {"rank1"}, 100.0, 5.0) == hang


@pytest.mark.parametrize(
    "seen",
    [
        pytest.param([FORWARD], id="nobody waits"),
        pytest.param([WAITS, FORWARD, observed(2, Phase.FORWARD, "/home/me/model.py", still_s=1.0)], id="another acts"),
        pytest.param([observed(0, Phase.COMMUNICATE, still_s=1.0), FORWARD], id="the other has not waited for long"),
        pytest.param(
            [WAITS, observed(1, Phase.FORWARD, COMPILER, "/home/me/model.py")],
            id="it compiles",
        ),
        pytest.param([WAITS, observed(1, Phase.FORWARD, "/usr/lib/python3/bdb.py")], id="somebody looks at it"),
        pytest.param([WAITS, observed(3, Phase.FORWARD, "/home/me/model.py")], id="it is not late"),
    ],
)
def test_else_nobody_is_blamed(seen: list[Observed]) -> None:
    assert find_late(seen, {"rank1"}, 100.0, 5.0) is None
