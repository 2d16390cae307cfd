"""Notes that another process reads, stacks on a signal, and connections without an answer."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import echelon
from echelon.launch.noticeboard import NoticeBoard
from echelon.launch.places.base import Group, Job, Process
from echelon.observe.notes import ASK_SIGNAL, SLOT_BYTES, STACK_SIGNAL, Note, RankNotes
from echelon.observe.phases import Phase
from echelon.observe.stacks import Stack, StackFrame, stack_of
from echelon.observe.tcp import tcp_state

MOST_NS = 3000.0  # an idle machine takes 300

CHILD = """
import ctypes, sys
from echelon.observe.notes import open_notes
notes = open_notes()
notes.at_step(7)
notes.enter("forward")
def hold():
    while True:
        ctypes.PyDLL(None).sleep(60)  # until the signal
print("there", flush=True)
hold()
"""


def test_a_process_that_holds_the_interpreter_for_good_is_read_and_gives_its_stack() -> None:
    board = NoticeBoard(["rank0", "rank1"])
    (process,) = board.noted(Job((Group((Process("rank1", "x:y"),)),))).groups[0].processes
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD], env={**os.environ, **process.environment}, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == b"there\n"
        time.sleep(0.2)  # it is in C by then; if not, the stack is the same but for its innermost line
        note = board.note("rank1", child.pid)
        assert note is not None and (note.activity, note.step, note.changes, note.answers) == ("forward", 7, 1, True)
        assert board.note("rank1", child.pid + 1) is None and board.note("rank0", child.pid) is None
        child.send_signal(STACK_SIGNAL)
        deadline = time.monotonic() + 20
        while (stack := stack_of(board.stacks("rank1"), note.thread)) is None and time.monotonic() < deadline:
            time.sleep(0.02)
        assert stack is not None and stack.frames[0].function in ("hold", "__call__")
        board.clear_stacks("rank1")
        assert board.stacks("rank1") == ""
        assert child.poll() is None
    finally:
        child.kill()
        child.wait()
        board.close()


BUSY = """
from echelon.observe.notes import open_notes
notes = open_notes()
notes.enter("forward")
def generate(depth):
    if depth:
        yield from generate(depth - 1)
    yield [depth]
print("there", flush=True)
while True:
    for depth in range(0, 200, 7):
        list(generate(depth))
"""


@pytest.mark.slow
def test_who_runs_python_gives_its_stack_as_often_as_it_is_asked_and_lives() -> None:
    """`faulthandler` ends such a process in one of some hundred times: it walks frames that are given back."""
    board = NoticeBoard(["rank0"])
    (process,) = board.noted(Job((Group((Process("rank0", "x:y"),)),))).groups[0].processes
    child = subprocess.Popen(
        [sys.executable, "-c", BUSY], env={**os.environ, **process.environment}, stdout=subprocess.PIPE
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == b"there\n"
        for _ in range(2000):
            board.clear_stacks("rank0")
            child.send_signal(ASK_SIGNAL)
            deadline = time.monotonic() + 20
            while not board.stacks("rank0"):
                assert child.poll() is None and time.monotonic() < deadline
        stack = stack_of(board.stacks("rank0"), 0)
        assert stack is not None and stack.frames[-1].function == "<module>"
    finally:
        child.kill()
        child.wait()
        board.close()


def test_a_note_costs_less_than_a_microsecond_or_so() -> None:
    memory = memoryview(bytearray(SLOT_BYTES))
    notes = RankNotes(memory)
    best = min(_ns_per_note(notes) for _ in range(5))
    print(f"{best:.0f} ns a note")
    assert best < MOST_NS
    note = Note.read(memory)
    assert note is not None and note.activity == "forward" and note.pid == os.getpid()


def test_a_board_knows_whether_one_of_its_processes_has_trained() -> None:
    board = NoticeBoard(["rank0", "rank1"])
    (process,) = board.noted(Job((Group((Process("rank1", "x:y"),)),))).groups[0].processes
    code = "from echelon.observe.notes import open_notes; open_notes().{}"
    try:
        for said, has_trained in (("at_step(1)", False), ("finish_step()", True)):
            environment = {**os.environ, **process.environment}
            subprocess.run([sys.executable, "-c", code.format(said)], env=environment, check=True)
            assert board.has_trained() == has_trained
    finally:
        board.close()


def _ns_per_note(notes: RankNotes) -> float:
    began = time.perf_counter_ns()
    for _ in range(1000):
        notes.enter(Phase.FORWARD)
    return (time.perf_counter_ns() - began) / 1000


@pytest.mark.parametrize(
    ("file", "waits", "is_user"),
    [
        ("/v/site-packages/torch/distributed/distributed_c10d.py", True, False),
        ("/v/site-packages/zmq/sugar/poll.py", True, False),
        ("/v/site-packages/torch/nn/functional.py", False, False),
        ("/home/me/net.py", False, True),
        (threading.__file__, False, True),  # a wait of Python's is its caller's
    ],
)
def test_what_a_call_is(file: str, waits: bool, is_user: bool) -> None:
    stack = Stack((StackFrame(file, 1, "f"), StackFrame("/home/me/net.py", 2, "g")))
    assert (stack.waits, stack.is_in_user_code) == (waits, is_user)


@pytest.mark.parametrize(
    "room", ["trainer/membership", "trainer/rescue", "trainer/second_copy", "parallel/shard_gather"]
)
def test_waits_in_code_that_is_not_pythons_are_known_by_who_called_them(room: str) -> None:
    file = Path(echelon.__file__).parent / f"{room}.py"
    assert file.exists() and Stack((StackFrame(str(file), 1, "f"),)).waits


def test_the_command_that_a_process_was_forked_from_is_no_code_of_a_users() -> None:
    ours = StackFrame("/v/site-packages/echelon/trainer/evaluate.py", 1, "evaluate")
    assert Stack((ours, StackFrame("/v/bin/echelon", 10, "<module>"))).of_user is None
    own = StackFrame("/home/me/bin/echelon-study/net.py", 2, "g")
    assert Stack((ours, own)).of_user == own


def test_a_connection_of_this_process_is_seen() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        state = tcp_state(os.getpid())
    assert not state.silent and "127.0.0.1" not in state.own
    assert tcp_state(2**22 + 1).own == ()


def test_a_connection_is_seen_where_the_kernel_has_no_ipv6(monkeypatch: pytest.MonkeyPatch) -> None:
    read = Path.read_text

    def without_ipv6(path: Path) -> str:
        if path.name == "tcp6":
            raise FileNotFoundError(path)
        return read(path)

    monkeypatch.setattr(Path, "read_text", without_ipv6)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        client.setblocking(False)
        with pytest.raises(BlockingIOError):
            while True:  # nobody reads it
                client.send(bytes(1 << 16))
        looks = (tcp_state(os.getpid()).silent for _ in range(20))  # buffers grow for a while
        assert ("127.0.0.1",) in looks


def test_only_the_stack_that_is_asked_for_is_read(tmp_path: Path) -> None:
    text = (
        'Thread 0x0000000000000002 (most recent call first):\n  File "b.py", line 1 in b\n\n'
        'Current thread 0x0000000000000001 [python] (most recent call first):\n  File "a.py", line 2 in a\n'
    )
    stack = stack_of(text, 1)
    assert stack is not None and [str(frame) for frame in stack.frames] == ["a.py:2 in a"]
    assert stack_of(text, 3) is None
