"""A member whose collective does not notice that its connections are broken ends itself, so that the others go on."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os, socket, sys, threading
from pathlib import Path
from echelon.core.terms import Term, TermFolder
from echelon.trainer import membership

membership._STUCK_S = 1.0
folder = TermFolder(Path(sys.argv[1]))
member = membership.Membership(folder, "rank0.0", timeout_s=60.0)
with member.connecting():
    listener = socket.create_server(("127.0.0.1", 0))
    peer = socket.create_connection(listener.getsockname()) if sys.argv[2] != "alone" else None

def turns():  # as gloo's thread does, on a connection whose lock another one holds
    while True:
        pass

threading.Thread(target=turns, daemon=True).start()
if sys.argv[2] == "between two terms":
    folder.publish(Term(1, (), lost_by=1))
    threading.Timer(4.0, lambda: os._exit(0)).start()
    member.next_term()
folder.publish(Term(1, ("rank0.0",), lost_by=1))
where = "/torch/distributed/collectives.py" if sys.argv[2] != "in the user's code" else "/home/user/model.py"
exec(compile("threading.Event().wait(30.0 if sys.argv[2] == 'with a peer' else 4.0)", where, "exec"))
os._exit(0)
"""


def _run(folder: Path, peer: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-c", PROGRAM, str(folder), peer]
    return subprocess.run(command, timeout=100, check=False, capture_output=True)


def test_who_waits_is_found_though_a_thread_beside_is_busy(tmp_path: Path) -> None:
    done = _run(tmp_path, "with a peer")
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert b"this process ends" in done.stderr


def test_who_is_alone_waits_for_no_peer(tmp_path: Path) -> None:
    """It may wait for its data when others come."""
    done = _run(tmp_path, "alone")
    assert done.returncode == 0, done.stderr


def test_code_of_the_user_may_take_its_time(tmp_path: Path) -> None:
    """It may wait for a disk in an evaluation: nobody has lost what this process alone may have."""
    done = _run(tmp_path, "in the user's code")
    assert done.returncode == 0, done.stderr


def test_who_waits_for_a_term_is_not_stuck(tmp_path: Path) -> None:
    """Where more than half of the machines that may lead are lost, nobody may go on; what is trained is kept."""
    done = _run(tmp_path, "between two terms")
    assert done.returncode == 0, done.stderr
