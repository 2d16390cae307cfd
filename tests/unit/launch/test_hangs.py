"""A hang is measured by what a process did in its steps, not by how long it took to start."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from unittest.mock import Mock

import pytest

from echelon.launch import hangs, rhythm
from echelon.launch.culprit import Elsewhere, Hang, Living, Observed
from echelon.launch.noticeboard import NoticeBoard
from echelon.launch.places.base import Group, Job, Process, Restart
from echelon.observe.notes import STACK_SIGNAL, Note
from echelon.observe.phases import Phase
from echelon.observe.stacks import Stack, StackFrame

DEADLINE_S = 10.0
WORKERS = (Living("worker0", "here", 1), Living("worker1", "here", 2))


def test_who_hangs_right_after_a_slow_start_is_named_within_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Worker 1 starts for 20 s and loads data without end from its 22nd step on, between two looks."""
    clock = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    notes = {
        name: Note("start", 0, clock - 20.0, 1, pid, 0, False, False) for name, pid in (("worker0", 1), ("worker1", 2))
    }
    board, place, listener = Mock(), Mock(), Mock()
    board.note.side_effect = lambda name, pid: notes[name]
    place.is_silent.return_value = False
    watch = hangs.HangWatch(board, place, hangs.NoOthers(), DEADLINE_S, listener, Restart.ALONE)
    watch.look(WORKERS)
    notes["worker1"] = Note(Phase.DATA, 22, clock + 0.3, 100, 2, 0, False, False, 21)
    for look in range(1, 14):
        clock = 1000.0 + look
        notes["worker0"] = Note(Phase.FORWARD, 10 * look, clock, 50 * look, 1, 0, False, False)
        watch.look(WORKERS)
    (verdict,) = [call.args[0] for call in listener.on_hang.call_args_list]
    assert isinstance(verdict, Hang)
    assert verdict.process == WORKERS[1] and verdict.activity == Phase.DATA and verdict.since_s == pytest.approx(1000.3)


def test_what_was_told_to_the_machine_that_judges_is_taken_back_when_the_suspicion_is_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An hour later it would blame who started slowly."""
    clock = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    monkeypatch.setattr(hangs, "STACKS_S", 0.0)
    notes = {process.pid: Note("start", 0, clock - 20.0, 1, process.pid, 0, False, False) for process in WORKERS}
    board, place, others = Mock(), Mock(), Mock()
    board.note.side_effect = lambda name, pid: notes[pid]
    place.is_silent.return_value = False
    others.elsewhere.return_value = Elsewhere(is_complete=False)
    watch = hangs.HangWatch(board, place, others, DEADLINE_S, Mock(), Restart.TOGETHER)
    watch.look(WORKERS)
    assert [o.process for o in others.share.call_args.args[0]] == list(WORKERS)
    clock += DEADLINE_S / 10
    notes |= {pid: Note(Phase.FORWARD, 1, clock, 2, pid, 0, False, False) for pid in notes}
    watch.look(WORKERS)
    assert not others.share.call_args.args[0]


@pytest.mark.parametrize(
    ("restart", "is_ended"), [(Restart.BESIDE, True), (Restart.RESCUED, True), (Restart.TOGETHER, False)]
)
def test_who_hangs_where_survivors_act_is_ended_before_the_others_give_up(
    restart: Restart, is_ended: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Worker 1 never returns from a forward pass that its rhythm says nothing of: it is its first."""
    clock = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    monkeypatch.setattr(hangs, "STACKS_S", 0.0)
    board, place = Mock(), Mock()
    notes = {
        "worker0": Note(Phase.COMMUNICATE, 1, clock, 4, 1, 0, False, False),
        "worker1": Note(Phase.FORWARD, 1, clock, 3, 2, 0, False, False),
    }
    board.note.side_effect = lambda name, pid: notes[name]
    place.is_silent.return_value = False
    watch = hangs.HangWatch(board, place, hangs.NoOthers(), DEADLINE_S, Mock(), restart)
    for _ in range(20):
        watch.look(WORKERS)
        clock += 0.5  # its deadline has not passed at the last look
    ended = [call.args[0] for call in place.signal.call_args_list if call.args[0]]
    assert ended[:1] == ([["worker1"]] if is_ended else [])
    assert bool(watch.ended(2)) is is_ended


def ended_of(
    monkeypatch: pytest.MonkeyPatch, others_at: str, others: hangs.Others, stacks: Callable[[float], Stack | None]
) -> float:
    """Return after how long worker 1 is ended, whose forward pass uses no processor and began after many steps.

    Args:
        others_at: what worker 0 is at.
        others: the other machines.
        stacks: returns the stack of worker 1, by the time.
    """
    began = clock = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    monkeypatch.setattr(rhythm, "processor_s", lambda pid: 0.0)
    monkeypatch.setattr(rhythm, "acts", lambda pid: 0.0)
    notes = {
        "worker0": Note(others_at, 9, clock, 4, 1, 0, False, False, 8),
        "worker1": Note(Phase.FORWARD, 8, clock - 0.5, 3, 2, 0, False, False, 8),
    }
    board, place = Mock(), Mock()
    board.note.side_effect = lambda name, pid: notes[name]
    place.is_silent.return_value = False
    watch = hangs.HangWatch(board, place, others, 60.0, Mock(), Restart.BESIDE)

    def observe(living: object) -> list[Observed]:
        return [Observed(p, notes[p.name], clock - began, stacks(clock) if p.pid == 2 else None) for p in WORKERS]

    monkeypatch.setattr(watch, "_observe", observe)
    watch.look(WORKERS)
    notes["worker1"] = Note(Phase.FORWARD, 9, clock, 9, 2, 0, False, False, 8)
    while clock < began + 70.0:
        watch.look(WORKERS)
        if watch.ended(2):
            return clock - began
        assert not watch.ended(1)
        clock += 0.5
    return float("inf")


def stack_at(line: int) -> Stack:
    return Stack((StackFrame("/home/me/net.py", line, "forward"),))


def test_who_is_idle_is_ended_once_its_stack_has_not_changed_for_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    after_s = ended_of(monkeypatch, Phase.COMMUNICATE, hangs.NoOthers(), lambda clock: stack_at(1))
    assert after_s == pytest.approx(20.0, abs=2.5)
    after_s = ended_of(monkeypatch, Phase.COMMUNICATE, hangs.NoOthers(), lambda clock: stack_at(int(clock / 5)))
    assert after_s == pytest.approx(54.0, abs=2.5)


def test_nobody_is_ended_where_all_are_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ended_of(monkeypatch, Phase.FORWARD, hangs.NoOthers(), lambda clock: stack_at(1)) == float("inf")


def test_nobody_is_ended_while_other_machines_have_not_told_what_theirs_are_at(monkeypatch: pytest.MonkeyPatch) -> None:
    others = Mock()
    others.elsewhere.return_value = Elsewhere(is_complete=False)
    assert ended_of(monkeypatch, Phase.COMMUNICATE, others, lambda clock: stack_at(1)) == float("inf")


def test_who_compiles_is_not_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    compiles = Stack((StackFrame("/v/site-packages/torch/_inductor/x.py", 1, "f"),))
    assert ended_of(monkeypatch, Phase.COMMUNICATE, hangs.NoOthers(), lambda clock: compiles) == float("inf")


CHILD = """
import ctypes, os
from echelon.observe.notes import open_notes
open_notes().enter("forward")
def runs_python():
    while True:
        pass
def runs_c():
    sum(range(1 << 60))
def holds_c():
    ctypes.PyDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)
def waits():
    ctypes.CDLL(None).read(os.pipe()[0], ctypes.create_string_buffer(1), 1)
print("there", flush=True)
{}()
"""


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_whatever_a_process_is_in_gives_its_stack_and_lives() -> None:
    names = ["runs_python", "runs_c", "holds_c", "waits"]
    board, place = NoticeBoard(names), Mock()
    processes = board.noted(Job((Group(tuple(Process(name, "x:y") for name in names)),))).groups[0].processes
    children = {
        p.name: subprocess.Popen(
            [sys.executable, "-c", CHILD.format(p.name)],
            env={**os.environ, **p.environment},
            stdout=subprocess.PIPE,
        )
        for p in processes
    }
    place.is_silent.return_value = False
    place.signal.side_effect = lambda asked, signum: [children[name].send_signal(signum) for name in asked]
    try:
        for child in children.values():
            assert child.stdout is not None and child.stdout.readline() == b"there\n"
        watch = hangs.HangWatch(board, place, hangs.NoOthers(), DEADLINE_S, Mock(), Restart.TOGETHER)
        living = [Living(name, "here", child.pid) for name, child in children.items()]
        seen: set[str] = set()
        for _ in range(20):  # who gets no processor is asked again
            observed = watch._observe(living)
            seen |= {o.process.name for o in observed if o.stack and o.process.name in str(o.stack)}
        assert seen == set(names) and all(child.poll() is None for child in children.values())
        at_once = [call.args[0] for call in place.signal.call_args_list if call.args[1] == STACK_SIGNAL]
        assert not any("runs_python" in asked for asked in at_once)
    finally:
        for child in children.values():
            child.kill()
            child.wait()
        board.close()
