"""What a user asks of a run's members: for one process, taken once."""

from __future__ import annotations

import os
from pathlib import Path

from echelon.launch.changes import REQUESTS_FOLDER, Change, Requests, ask


def test_a_request_is_taken_once_by_the_process_that_is_asked(tmp_path: Path) -> None:
    requests = Requests(tmp_path, every_s=0.0)
    assert (tmp_path / REQUESTS_FOLDER).stat().st_mode & 0o777 == 0o700
    ask(tmp_path, os.getpid(), Change(("worker1",), (7,)))
    ask(tmp_path, os.getpid() + 1, Change(["worker2"]))
    assert requests.take() == [Change(("worker1",), (7,))] and requests.take() == []


def test_what_was_asked_before_and_what_is_no_request_is_left_out(tmp_path: Path) -> None:
    Requests(tmp_path)
    ask(tmp_path, os.getpid(), Change(["worker1"]))
    requests = Requests(tmp_path, every_s=0.0)
    ask(tmp_path, os.getpid(), Change(["worker1"]))
    for file in (tmp_path / REQUESTS_FOLDER).iterdir():
        file.write_text('{"workers": 7')
    assert requests.take() == [] and not list((tmp_path / REQUESTS_FOLDER).iterdir())
