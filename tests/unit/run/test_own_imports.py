"""A command imports torchmetrics sparingly; a program of the user's has it as it is."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = (
    "import sys\n"
    "sys.argv = [sys.argv[1]]\n"
    "from echelon.run.own_imports import import_metrics\n"
    "import_metrics()\n"
    "print('torchmetrics' in sys.modules, 'scipy.signal' in sys.modules)\n"
)


@pytest.mark.parametrize(("name", "said"), [("bin/echelon", "True False\n"), ("train.py", "False False\n")])
def test_a_command_alone_imports_metrics_sparingly(name: str, said: str) -> None:
    command = [sys.executable, "-c", PROGRAM, name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, said), done.stderr
