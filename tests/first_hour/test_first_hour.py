"""The first hour finds no problem that a program can see; its transcript is for a person."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.first_hour.hour import spend_an_hour


@pytest.mark.slow
@pytest.mark.timeout(2400)
@pytest.mark.skipif(not all(map(shutil.which, ("uv", "tmux"))), reason="needs uv and tmux")
def test_a_first_hour_has_no_problems(tmp_path: Path) -> None:
    assert spend_an_hour(tmp_path / "out") == []
