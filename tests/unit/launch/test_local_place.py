"""Processes of this machine that cannot be started for a while: no file is left for the pipes to them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from echelon.config import build
from echelon.launch.places.base import Exited, PlaceFailed, Process
from echelon.launch.places.local import Local
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


IMPORTS_LONG = """
import signal
from echelon.launch.places.base import Exited, Process, Started
from echelon.launch.places.local import Local, start_import_server

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
