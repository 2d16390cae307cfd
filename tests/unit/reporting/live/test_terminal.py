"""`echelon watch` in a terminal and without one, and what it says to nonsense."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
from rich.console import Console

from echelon.cli import main
from echelon.reporting.live.snapshot import look
from echelon.reporting.live.state import LiveRun
from echelon.reporting.live.terminal import frame, line
from echelon.study import from_tries
from tests.unit.reporting.live.runs import append, make_live_run, start, steps
from tests.unit.study.fixtures import Planted, make_study

TRUTHS = {"sync=allreduce": Planted(), "compression=int8": Planted(status="refused", message="no")}


def echelon(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    """Run the command line in this process; returns its exit code."""
    monkeypatch.setattr(sys, "argv", ["echelon", *arguments])
    with pytest.raises(SystemExit) as left:
        main()
    return int(left.value.code or 0)


def drawn(folder: Path, height: int = 40, width: int = 140) -> str:
    """Draw a run's frame without a terminal."""
    run = LiveRun(folder)
    run.refresh()
    console = Console(file=io.StringIO(), width=width, height=height, color_system=None)
    console.print(frame(look(run, now=110.0), height))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_once_prints_plain_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = make_live_run(tmp_path / "run")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert echelon(monkeypatch, "watch", str(run), "--once") == 0
    text = capsys.readouterr().out
    assert "\x1b" not in text and "completed" in text and "step 240/240" in text and "610 MB" in text
    assert "…" not in text, "in 80 columns nothing is cut"
    assert echelon(monkeypatch, "watch", str(run)) == 0  # it is over: this ends by itself
    assert "completed" in capsys.readouterr().out


def test_a_study_is_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    study = from_tries({}, ["sync=allreduce", "compression=int8"], "1")
    folder = make_study(tmp_path / "s", study, TRUTHS)
    assert echelon(monkeypatch, "watch", str(folder), "--once") == 0
    text = capsys.readouterr().out
    assert "completed: 1 run was refused or failed" in text and "2 of 2 runs over" in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere", "--once"], "nowhere does not exist"),
        (["nowhere", "--wait", "10ms"], "nowhere does not exist"),
        (["empty", "--wait", "10ms"], "empty is an empty folder"),
        (["file"], "file is a file: name the folder"),
        (["other", "--once"], "other holds no run and no study"),
        (["runs/ruhn", "--once"], "did you mean runs/run?"),
        (["runs/run", "--port", "80"], "--port is the page's: it needs --serve"),
        (["runs/run", "--serve", "--once"], "exclude each other"),
        (["runs/run", "--serve", "--port", "70000"], "a port is a number from 1 to 65535"),
        (["runs/run", "--wait", "soon"], "'soon' is not a duration"),
    ],
)
def test_nonsense_is_answered_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    for name in ("file", "other/notes.txt"):
        (tmp_path / name).write_text("x")
    (tmp_path / "runs" / "run").mkdir(parents=True)
    append(tmp_path / "runs" / "run", start())
    assert echelon(monkeypatch, "watch", *arguments) == 2
    said = capsys.readouterr().err.splitlines()
    assert words in said[-1] and said[-1].startswith("echelon: ")
    assert len(said) <= 2 and (len(said) == 1 or said[0].startswith("no run in"))


def test_a_folder_that_is_waited_for_is_said_at_once_with_the_run_of_a_similar_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "digits-1").mkdir(parents=True)
    append(tmp_path / "runs" / "digits-1", start())
    assert echelon(monkeypatch, "watch", "runs/digts-1", "--wait", "10ms") == 2
    said = capsys.readouterr().err.splitlines()
    assert said[0].startswith("no run in runs/digts-1 yet: waiting up to 10 ms for it (--wait; Ctrl-C ends it)")
    assert all("did you mean runs/digits-1?" in line for line in said), said


def test_a_record_cannot_command_the_terminal(tmp_path: Path) -> None:
    append(tmp_path, start(model="\x1b[2J[red]mlp"), steps(10, 101.0))
    append(tmp_path, {"t": 102.0, "kind": "event", "name": "x\x07", "message": "a\x1b]0;owned\x07\nb [bold]c"})
    text = drawn(tmp_path)
    assert not any(ord(c) < 32 and c != "\n" for c in text)
    assert "[red]mlp" in text and "b [bold]c" in text


def test_many_ranks_fit_a_small_terminal(tmp_path: Path) -> None:
    phases = [[0.4, 0.1]] * 64
    append(tmp_path, start(world_size=64, hosts=["a"] * 64, pids=[1] * 64))
    append(tmp_path, {**steps(10, 101.0), "phases": phases, "memory_bytes": [1e8] * 64})
    text = drawn(tmp_path, height=24)
    assert len(text.splitlines()) <= 24 and "more ranks not shown" in text


def test_an_empty_record_is_a_frame_and_a_line(tmp_path: Path) -> None:
    assert "starting" in drawn(tmp_path)
    run = LiveRun(tmp_path)
    assert "no step yet" in line(look(run, now=1.0))
    append(tmp_path, start(), steps(10, 101.0, loss=float("nan")))
    assert "loss nan" in drawn(tmp_path)
