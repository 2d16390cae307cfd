"""A command, or a script of one thread, imports torchmetrics sparingly; where others could see it, it is as it is."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import sys, threading
sys.argv = [sys.argv[1]]
from echelon.run.own_imports import import_metrics
end = threading.Event()
others = [threading.Thread(target=end.wait) for _ in range({others})]
for each in others:
    each.start()
import_metrics()
print('torchmetrics' in sys.modules, 'scipy.signal' in sys.modules)
end.set()
"""


@pytest.mark.parametrize(("name", "others", "said"), [
    ("bin/echelon", 1, "True False\n"), ("train.py", 0, "True False\n"), ("train.py", 1, "False False\n"),
])  # fmt: skip
def test_metrics_are_imported_sparingly_where_nobody_sees_it(name: str, others: int, said: str) -> None:
    command = [sys.executable, "-c", PROGRAM.format(others=others), name]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, said), done.stderr
