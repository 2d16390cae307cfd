"""Commands that are given to this process, as `main` gives them to one of its own."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from echelon.cli import _run as run_command


@dataclass(frozen=True)
class Said:
    """What a command printed, and its exit code."""

    returncode: int
    stdout: str
    stderr: str


Here = Callable[..., Said]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Here:
    """Give commands to this process, in an empty folder, as `main` does in one of its own."""

    def give(*args: str) -> Said:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["echelon", *args])
            patch.chdir(tmp_path)
            capsys.readouterr()
            code = run_command()
        return Said(code, *capsys.readouterr())

    return give
