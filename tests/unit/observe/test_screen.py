"""What is shown: lines where nobody draws, at least one now and then; bars on a terminal."""

from __future__ import annotations

import io
import sys
import time
from collections.abc import Callable

import pytest

from echelon.observe import screen
from echelon.observe.screen import Bar, Screen


def _wait(ready: Callable[[], bool]) -> None:
    ends = time.monotonic() + 30
    while not ready():
        assert time.monotonic() < ends, "not in time"
        time.sleep(0.01)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(screen, "QUIET_S", 0.05)
    monkeypatch.setattr(screen, "_LOOK_S", 0.01)


def test_in_a_pipe_a_line_says_now_and_then_how_far_it_is(quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    said = ""

    def enough() -> bool:
        nonlocal said
        said += capsys.readouterr().out
        return "evaluation 3 of 8, " in said and "so far: slowly" in said

    with Screen() as shown, shown.bar("evaluation", 8, "slowly") as bar:
        bar.advance(3)
        _wait(enough)
    capsys.readouterr()
    time.sleep(0.1)
    assert capsys.readouterr().out == ""  # nothing goes on any more


def test_what_another_thread_does_is_shown_while_it_does(quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    writes = True
    with Screen() as shown:
        shown.watch("checkpoint: writing", lambda: writes)
        _wait(lambda: "checkpoint: writing, " in capsys.readouterr().out)
        writes = False
        _wait(lambda: not shown._bars)


def test_what_is_not_visible_says_nothing(quick: None, capsys: pytest.CaptureFixture[str]) -> None:
    with Screen(visible=False) as shown, shown.bar("evaluation", 8):
        shown.say("a line")
        time.sleep(0.1)
    assert capsys.readouterr().out == ""


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_notebook_has_lines(quick: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Its kernel sets FORCE_COLOR, and is no terminal: bars would pile up."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    with Screen() as shown, shown.bar("evaluation", 8):
        assert not shown.is_live
        _wait(lambda: "evaluation 0 of 8, " in capsys.readouterr().out)


def test_a_terminal_that_others_write_to_has_lines(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", _Terminal())
    monkeypatch.setenv("TERM", "xterm")
    assert Screen(to_stderr=True).is_live and not Screen(to_stderr=True, lines=True).is_live


def test_a_terminal_has_bars_and_lines_above_them(quick: None, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "40")
    with Screen() as shown, shown.bar("evaluation", 8):
        _wait(lambda: shown._progress.live.is_started)
        shown.say("a line")
        shown.say("Ctrl-C stops it after a checkpoint, `echelon resume runs/a` continues it")
    assert "a line" in terminal.getvalue()
    assert "\n`echelon resume runs/a` continues it\n" in terminal.getvalue()  # a command that is to be copied is whole
    assert not shown._progress.live.is_started


def test_what_follows_in_one_bar_counts_from_its_own_beginning() -> None:
    bar = Bar("evaluation, batch", 79, done=79)
    bar.begin("evaluation of the test set, batch", 157)
    bar.advance()
    assert bar.line().startswith("evaluation of the test set, batch 1 of 157, ")
