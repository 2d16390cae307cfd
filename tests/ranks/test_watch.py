"""A run that is watched while it goes: its page, its terminal view, and nothing left when it has ended."""

from __future__ import annotations

import json
import os
import re
import signal
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.ranks.runs import Run, Runs


def address_of(run: Run) -> str:
    """Wait for the address that a command printed."""
    found: re.Match[str] = run.wait_for(lambda: re.search(r"live: (http\S+)", run.text()), "an address")
    return found[1]


def state(url: str) -> dict[str, Any]:
    """Fetch the numbers of a page."""
    with urllib.request.urlopen(url.replace("/?", "/state.json?"), timeout=10) as answer:
        found: dict[str, Any] = json.load(answer)
    return found


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_serves_its_page_while_it_goes(tmp_path: Path) -> None:
    with Runs(tmp_path) as runs:
        run = runs.train("digits", "--workers", "2", "--epochs", "10000", "--serve", folder="r")
        url = address_of(run)
        assert url.startswith("http://127.0.0.1:")
        run.wait_for_step(10)
        run.wait_for(lambda: any(r["resources"]["rss_bytes"] for r in state(url)["ranks"][1:]), "what the ranks use")
        seen = state(url)
        assert seen["status"] == "running" and seen["step"] >= 10 and seen["ranks"][1]["resources"]["rss_bytes"] > 1e7
        watch = runs.start("watch", run.folder, "--once", folder="w")
        assert watch.end() == 0 and "running" in watch.text(), watch.text()
        os.kill(run.process.pid, signal.SIGTERM)
        run.end()
        with pytest.raises(urllib.error.URLError):
            state(url)
        assert "stopped" in run.text() and "Traceback" not in run.text()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_page_goes_with_its_run_however_that_ends(tmp_path: Path) -> None:
    with Runs(tmp_path) as runs:
        run = runs.train("digits", "--workers", "1", "--epochs", "10000", "--serve", folder="r")
        url = address_of(run)
        run.wait_for_step(1)
        watch = runs.start("watch", run.folder, folder="w")
        os.kill(run.process.pid, signal.SIGKILL)
        run.end()
        assert run.left_behind() == []
        with pytest.raises(urllib.error.URLError):
            state(url)
        assert watch.end(60) == 0 and "gone" in watch.text(), watch.text()


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_page_that_dies_does_not_stop_the_run(tmp_path: Path) -> None:
    with Runs(tmp_path) as runs:
        run = runs.train("digits", "--workers", "1", "--epochs", "3", "--serve", folder="r")
        address_of(run)
        (server,) = run.wait_for(
            lambda: [p for p in children(run.process.pid) if "echelon.study.serving" in p[1]], "it"
        )
        os.kill(server[0], signal.SIGKILL)
        assert run.end() == 0, run.text()
        assert "the live page ended before the run did" in run.errors() and "completed" in run.text()


def children(pid: int) -> list[tuple[int, str]]:
    """Return the processes that a process started, with their commands."""
    import psutil

    return [(c.pid, " ".join(c.cmdline())) for c in psutil.Process(pid).children()]
