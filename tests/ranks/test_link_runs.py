"""Runs over a shaped link: their bytes are the kernel's, and however a run ends its network goes with it."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from echelon.launch.netns import wait_until_gone
from echelon.reporting.report import load_run
from echelon.reporting.report.tables import link_words
from tests.ranks.links import NEEDS_LINKS
from tests.ranks.runs import Runs

pytestmark = [*NEEDS_LINKS, pytest.mark.timeout(400)]
DEADLINE_S = 30.0
HEADERS_BYTES = 66  # Ethernet, IPv4 and TCP with timestamps


@pytest.mark.parametrize(
    "compression",
    [
        pytest.param("topk(0.01)", marks=pytest.mark.long),
        pytest.param("powersgd(2)", marks=pytest.mark.slow),
        pytest.param("int8", marks=pytest.mark.slow),
    ],
)
def test_the_bytes_of_a_run_are_those_that_the_kernel_counts(tmp_path: Path, compression: str) -> None:
    with Runs(tmp_path) as runs:
        run = runs.train("digits", "--model", "mlp", "--workers", "2", "--link", "100mbit",
                         "--compression", compression, "--max-steps", "60", "--epochs", "9",
                         "--eval-every", "0", folder="run")  # fmt: skip
        assert run.end() == 0, run.text()
        (link,), (end,), windows = run.records("link"), run.records("end"), run.records("steps")
        (words,) = link_words(load_run(run.folder))
    said = sum(w["wire_bytes"] + w["other_wire_bytes"] for w in windows) + end["other_wire_bytes"]
    carried = sum(host["sent_bytes"] - HEADERS_BYTES * host["sent_packets"] for host in link["hosts"])
    assert carried == pytest.approx(said, rel=0.05)
    assert abs(float(words.rpartition("(")[2].partition("%")[0])) <= 5, words


def _interfaces() -> set[str]:
    return {path.name for path in Path("/sys/class/net").iterdir()}


@pytest.mark.parametrize(
    "how", [pytest.param(signal.SIGKILL, marks=pytest.mark.long), pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_the_network_goes_with_a_run_that_is_ended(tmp_path: Path, how: signal.Signals) -> None:
    before = _interfaces()
    with Runs(tmp_path) as runs:
        run = runs.train("digits", "--workers", "2", "--link", "100mbit", "--epochs", "1000", folder="run")
        run.wait_for_step(5)
        made = _interfaces() - before
        assert made
        os.kill(run.process.pid, how)
        run.end()
        assert not run.left_behind()
    for name in made:
        wait_until_gone(name, DEADLINE_S)  # the kernel takes a namespace down after its last process has ended
    routes = subprocess.run(["ip", "route"], capture_output=True, text=True, check=True).stdout
    assert not any(name in routes for name in made)
