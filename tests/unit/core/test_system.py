"""A system on which nothing runs is told so in one line, by the command and from Python."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from echelon.core.system import short_spins_inside, why_unsupported

COMMAND = "import echelon.cli; sys.argv = ['echelon', 'train', 'digits']; echelon.cli.command()"
PYTHON = "import echelon; echelon.train"


def test_this_system_is_supported() -> None:
    assert why_unsupported() == ""


def test_what_threads_read_is_in_the_environment_for_a_moment_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    with short_spins_inside():
        assert os.environ["GOMP_SPINCOUNT"] == "1000"
    assert "GOMP_SPINCOUNT" not in os.environ
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    with short_spins_inside():
        assert os.environ["GOMP_SPINCOUNT"] == "7"
    assert os.environ["GOMP_SPINCOUNT"] == "7"


def test_where_nobody_tried_it_the_user_may(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "ECHELON_UNTRIED=1" in why_unsupported("darwin", "little")
    monkeypatch.setenv("ECHELON_UNTRIED", "1")
    assert why_unsupported("darwin", "little") == ""


@pytest.mark.parametrize("fake", ["sys.platform = 'win32'", "sys.byteorder = 'big'", "import os; del os.fork"])
@pytest.mark.parametrize(("code", "exit_code"), [(COMMAND, 2), (PYTHON, 1)], ids=["command", "Python"])
def test_another_system_is_refused_in_one_line(fake: str, code: str, exit_code: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; {fake}; {code}"], capture_output=True, text=True, timeout=60, check=False
    )
    last = done.stderr.strip().splitlines()[-1]
    assert done.returncode == exit_code and not done.stdout and "not supported" in last, done
    if exit_code == 2:
        assert done.stderr.startswith("echelon: ") and done.stderr.count("\n") == 1, done
