from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from echelon.core.stop import STOP_SIGNALS, StopFlag, Stopped, stop_on_signals, stopped_exit_code


@pytest.fixture(autouse=True)
def _default_handlers() -> Iterator[None]:
    """Take the signals as a terminal's program does, also where the tests were started with some ignored (nohup)."""
    before = {signum: signal.signal(signum, signal.default_int_handler) for signum in STOP_SIGNALS}
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)


@pytest.mark.parametrize("signum", STOP_SIGNALS)
def test_a_signal_sets_the_flag_and_the_first_one_counts(signum: int) -> None:
    before = signal.getsignal(signum)
    with stop_on_signals() as stop:
        assert not stop
        signal.raise_signal(signum)
        signal.raise_signal(signal.SIGTERM)
        assert stop and stop.signum == signum
    assert signal.getsignal(signum) is before


def test_it_raises_once() -> None:
    with stop_on_signals(raises=True) as stop:
        with pytest.raises(Stopped, match="SIGHUP"):
            signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGTERM)
        assert stop.signum == signal.SIGHUP


def test_what_was_ignored_stays_ignored() -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stop_on_signals(raises=True) as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop and signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_another_thread_changes_nothing() -> None:
    flags: list[StopFlag] = []

    def enter() -> None:
        with stop_on_signals() as stop:
            flags.append(stop)

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join(10)
    assert flags and not flags[0]


def test_exit_codes_are_those_of_shells() -> None:
    assert [stopped_exit_code(s) for s in STOP_SIGNALS] == [143, 130, 129, 131]
    assert stopped_exit_code(0) == 143  # another machine's


SHOW = (
    "from echelon.core.output import outlive_readers; outlive_readers(); input(); print('one'); print('two'); print(3)"
)


def test_output_outlives_a_pipe() -> None:
    command = [sys.executable, "-c", SHOW]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stderr is not None and process.stdin is not None
    process.stdout.close()
    process.stdin.write("go\n")
    process.stdin.close()
    said = process.stderr.read().splitlines()
    process.stderr.close()
    assert process.wait(30) == 0 and said == [
        "echelon: nobody reads standard output any more; what is shown goes nowhere"
    ]


def test_output_outlives_a_terminal() -> None:
    ours, theirs = pty.openpty()
    code = f"import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN); {SHOW}"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=theirs, stderr=theirs, start_new_session=True
    )
    os.close(theirs)
    os.close(ours)
    process.communicate(b"go\n", timeout=30)
    assert process.returncode == 0


SWALLOWS = """
import os, signal
from echelon.core.stop import Stopped, stop_at_once, stop_on_signals
stop_at_once()
for signum in {signals}:
    try:
        os.kill(os.getpid(), signum)
    except BaseException as error:
        print(type(error).__name__)
try:
    with stop_on_signals(raises=True):
        print("began")
except Stopped as stop:
    print(stop.signum)
with stop_on_signals() as flag:
    print(flag.signum)
"""


@pytest.mark.parametrize(
    ("signals", "printed"),
    [
        ("[]", ["began", "0"]),
        ("[2]", ["KeyboardInterrupt", "2", "2"]),
        ("[15, 2]", ["Stopped", "KeyboardInterrupt", "15", "15"]),
    ],
)
def test_a_signal_whose_exception_was_swallowed_stops_what_begins_after_it(signals: str, printed: list[str]) -> None:
    command = [sys.executable, "-c", SWALLOWS.format(signals=signals)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=60)
    assert done.stdout.split() == printed
