"""Processes of this machine that cannot be started for a while: no file is left for the pipes to them."""

from __future__ import annotations

import signal

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
