"""Processes of this machine that cannot be started for a while: no file is left for the pipes to them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from echelon.config import LaunchConfig, build
from echelon.core.errors import UserError
from echelon.launch.places import PlaceChoice
from echelon.launch.places.base import Exited, PlaceFailed, Process
from echelon.launch.places.cluster import NodeRank
from echelon.launch.places.local import Local
from echelon.launch.plan import thread_count
from echelon.observe.notes import STACK_SIGNAL
from echelon.run.resolve import launch_request
from tests.unit.launch.no_files import no_file_left

PROCESSES = [Process("rank0", "os:getpid"), Process("rank1", "os:getpid")]


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_what_waits_for_files_is_no_death_and_ends_when_it_is_ended(
    signum: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    place = Local()
    with no_file_left():
        place.start(PROCESSES)
        place.signal(["rank0"], STACK_SIGNAL)
        assert place.events(0) == []
        place.signal(["rank0", "rank1"], signum)
        assert place.events(0) == [Exited("rank0", -signum), Exited("rank1", -signum)]
    assert place.events(0) == []
    assert [r.message for r in caplog.records] == ["rank0 cannot start yet: Too many open files"]


def test_it_waits_as_long_as_io_patience_and_no_longer() -> None:
    place = launch_request(build(None, {"checkpoint.io_patience": "50ms"}).config).place.build()
    with no_file_left(), pytest.raises(PlaceFailed, match="rank0 could not start for 50 ms: Too many open files"):
        place.start(PROCESSES)
        while True:
            place.events(0.01)


@pytest.mark.parametrize(("on", "stop_s", "saving_s"), [
    ("local", 600, 540), ("local(grace=30s)", 30, 27), ("local(grace=5s)", 5, 2.5),
    ("slurm(time=8h)", 120, 108), ("slurm(time=8h, notice=20s)", 20, 17), ("ray", 600, 540),
    ('k8s(image="i", claim=c, mount="/r")', 600, 540), ('k8s(image="i", claim=c, mount="/r", grace=1h)', 3600, 3240),
])  # fmt: skip
def test_a_stop_has_the_time_that_the_place_gives(on: str, stop_s: float, saving_s: float) -> None:
    config = build(None, {"launch.on": on}).config
    cluster = launch_request(config).place.cluster()
    node_rank = None if cluster is None else NodeRank(0, "a", "10.0.0.1", "1")
    place = launch_request(config, node_rank).place
    built = place.build()
    assert isinstance(built, Local) and (built.stop_s, built.saving_s) == (stop_s, saving_s)
    assert PlaceChoice(on).longest_stop_s() == stop_s
    assert place.runs_here == (on == "local")  # else nobody would end it in time


@pytest.mark.parametrize("grace", ["1s", "8gb"])
def test_a_time_in_which_no_run_ends_is_refused(grace: str) -> None:
    with pytest.raises(UserError, match=r"--on.*grace must be a duration of at least 5s"):
        launch_request(build(None, {"launch.on": f"local(grace={grace})"}).config)


IMPORTS_LONG = """
import signal
from echelon.launch.places.base import Exited, Process, Started
from echelon.launch.fork_server import start_import_server
from echelon.launch.places.local import Local

start_import_server(("slow_to_import",))
place = Local()
place.start([Process("rank0", "os:getpid")])
if {stops}:
    assert place.events(0.2) == []
    place.signal(["rank0"], signal.SIGTERM)
    assert place.events(0) == [Exited("rank0", -signal.SIGTERM)]
else:
    events = []
    while not any(isinstance(event, Exited) for event in events):
        events += place.events(60)
    assert [type(event) for event in events] == [Started, Exited], events
place.close()
"""


@pytest.mark.parametrize(("stops", "imports_s"), [(True, 600), (False, 1)])
def test_who_stops_does_not_wait_for_imports(tmp_path: Path, stops: bool, imports_s: int) -> None:
    (tmp_path / "slow_to_import.py").write_text(f"import time\ntime.sleep({imports_s})\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{Path.cwd()}"}
    command = [sys.executable, "-c", IMPORTS_LONG.format(stops=stops)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


HELD = """
from echelon.launch.fork_server import start_import_server
from echelon.launch.places import local
from echelon.launch.places.base import Process

class Held(local.Local):
    def signal(self, names, signum):
        pass  # as if the kernel held it

local._END_S = 0.1
start_import_server(())
place = Held()
place.start([Process("rank0", "signal:pause", folder="/")])
while not (events := place.events(60)):
    pass
place.close()
print(events, flush=True)
"""


def test_a_process_that_the_kernel_holds_does_not_keep_the_command_from_ending() -> None:
    done = subprocess.run([sys.executable, "-c", HELD], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0 and "Started" in done.stdout, done.stderr


SPINS = """
import multiprocessing, os, sys
from echelon.launch.fork_server import start_import_server

if __name__ == "__main__":
    start_import_server(())
    context = multiprocessing.get_context("forkserver")
    child = context.Process(target=exec, args=("import os; print(os.environ.get('GOMP_SPINCOUNT'), flush=True)",))
    child.start()
    child.join(60)
    print(os.environ.get("GOMP_SPINCOUNT"))
"""


@pytest.mark.parametrize(("policy", "said"), [("", "1000\nNone\n"), ("ACTIVE", "None\nNone\n")])
def test_threads_of_workers_sleep_soon_and_the_caller_keeps_its_own(policy: str, said: str, tmp_path: Path) -> None:
    (script := tmp_path / "spins.py").write_text(SPINS)
    environment = {
        name: value for name, value in os.environ.items() if name not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")
    }
    done = subprocess.run(
        [sys.executable, str(script)], env=environment | ({"OMP_WAIT_POLICY": policy} if policy else {}),
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, said), done.stderr


ENDED = """
import os, signal, sys
from multiprocessing import forkserver
from pathlib import Path
from echelon.cli import command
from echelon.launch.places.base import Exited, Process
from echelon.launch.fork_server import end_import_server, start_import_server
from echelon.launch.places.local import Local

def runs():
    start_import_server(("torch",))  # much to free: it takes a while to die
    place, events = Local(), []
    place.start([Process("rank0", "os:getpid")])
    while not any(isinstance(event, Exited) for event in events):
        events += place.events(60)
    place.close()
    return forkserver._forkserver._forkserver_pid

end_import_server()  # none has begun
first = runs()
end_import_server()
assert runs() != first, "another is started at once, and not the dying one asked"
second = forkserver._forkserver._forkserver_pid
end_import_server()
assert os.waitid(os.P_PID, second, os.WEXITED | os.WNOWAIT).si_status == signal.SIGKILL
assert list(Path(os.environ["TMPDIR"]).iterdir())
sys.argv = ["echelon", "list", "syncs"]
command()
"""


def test_a_command_ends_the_fork_server_and_leaves_no_temporary_folder() -> None:
    with tempfile.TemporaryDirectory() as folder:  # whose path is short enough for a socket
        done = subprocess.run(
            [sys.executable, "-c", ENDED], env={**os.environ, "TMPDIR": folder}, capture_output=True, text=True,
            timeout=60, check=False,
        )  # fmt: skip
        assert done.returncode == 0 and "allreduce" in done.stdout, done.stderr
        assert not list(Path(folder).iterdir())


@pytest.mark.parametrize(("variable", "threads", "taken"), [("", 0, 8), ("3", 0, 3), ("99", 0, 8), ("3", 5, 5)])
def test_a_worker_takes_its_share_of_the_cores_or_what_the_environment_allows(
    monkeypatch: pytest.MonkeyPatch, variable: str, threads: int, taken: int
) -> None:
    monkeypatch.setattr("echelon.launch.plan.usable_cores", lambda: 16)
    monkeypatch.setenv("OMP_NUM_THREADS", variable)
    assert thread_count(LaunchConfig(threads=threads), 2) == taken
