"""The fork server is a fork of a command that has imported what both need, else a Python of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ranks.run_many import python_path

PROGRAM = """
import contextlib, fcntl, os, signal, sys, threading
from echelon.launch.places.base import Exited, Process
from echelon.launch.fork_server import start_import_server
from echelon.launch.places.local import Local

lock = open("lock", "w")
fcntl.flock(lock, fcntl.LOCK_EX)
{before}
start_import_server(("torch", "broken", "missing", "later"), ("torch",))
import torch
assert "later" not in sys.modules
lock.close()
fcntl.flock(open("lock"), fcntl.LOCK_EX | fcntl.LOCK_NB)  # the server does not hold it
place, exits = Local(), []
place.start([Process(f"rank{{n}}", "worker:work", (n,)) for n in range(2)])
while len(exits) < 2:
    exits += [event for event in place.events(60) if isinstance(event, Exited)]
assert {{event.exit_code for event in exits}} == {{0}}, exits
place.close()
print("ended")
"""
WORKER = """
import multiprocessing, os, sys, tempfile, torch, later

def work(n):
    torch.set_num_threads(2)  # OpenMP starts threads here
    assert torch.ones(400, 400).matmul(torch.ones(400, 400)).sum() == 400 ** 3
    with multiprocessing.get_context("forkserver").Pool(1) as pool:  # of a user's own
        assert pool.map(abs, [-1]) == [1]
    assert tempfile.gettempdir() == os.environ["TMPDIR"], tempfile.gettempdir()
    open(f"forked{n}", "w").write(str(later.IMPORTED_BY != os.getpid()))
    open(f"server{n}", "w").write(str("program.py" in open(f"/proc/{later.IMPORTED_BY}/cmdline").read()))
"""


def _is_fork(folder: Path, before: str) -> bool:
    """Run two workers; returns whether they see in their server a fork of the program."""
    (folder / "program.py").write_text(PROGRAM.format(before=before))
    (folder / "worker.py").write_text(WORKER)
    (folder / "later.py").write_text("import os\nIMPORTED_BY = os.getpid()\n")
    (folder / "broken.py").write_text("raise RuntimeError('a library of another version')\n")
    (far := folder / ("x" * 120)).mkdir()  # too long a path for sockets
    environment = {**os.environ, "PYTHONPATH": python_path(folder), "TMPDIR": str(far)}
    done = subprocess.run(
        [sys.executable, "program.py"], cwd=folder, env=environment,
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "ended\n"), done.stderr
    assert {(folder / f"forked{n}").read_text() for n in range(2)} == {"True"}
    (told,) = {(folder / f"server{n}").read_text() for n in range(2)}
    return told == "True"


@pytest.mark.skipif(sys.platform != "linux", reason="a fork of what has imported a framework is safe on Linux alone")
def test_a_command_that_has_not_used_torch_is_forked_and_keeps_its_locks_to_itself(tmp_path: Path) -> None:
    assert _is_fork(tmp_path, "")


@pytest.mark.skipif(sys.platform != "linux", reason="there is no fork")
def test_a_command_of_a_newer_python_runs_with_its_arguments() -> None:
    """Newer versions of Python hand their server the arguments of the program behind what it is to run."""
    code = (
        "import os, sys\n"
        "from echelon.launch import fork_server\n"
        "read, write = os.pipe()\n"
        "text = f'import os, sys; os.write({write}, repr(sys.argv).encode())'\n"
        "pid = fork_server._fork(b'', [b'python', '-c', text, 'train', '2'], [write])\n"
        "os.close(write)\n"
        "print(os.read(read, 100).decode(), os.waitpid(pid, 0)[1])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == "['-c', 'train', '2'] 0\n", done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="processes' command lines are read in /proc")
@pytest.mark.parametrize(
    "before", ["import torch", "threading.Thread(target=threading.Event().wait, daemon=True).start()"]
)
def test_a_process_that_may_have_used_torch_or_has_threads_gets_a_python_of_its_own(
    tmp_path: Path, before: str
) -> None:
    assert not _is_fork(tmp_path, before)
