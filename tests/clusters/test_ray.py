"""Runs on a real Ray of three node processes: the same bits as here; a stop; a node lost and another one added."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusters.ray import Ray, missing, ray_cluster
from tests.clusters.test_slurm import check_same
from tests.ranks.runs import SMALL, Run, Runs

pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing() or "there is one"), pytest.mark.timeout(900)]
SETTINGS = ("train", "digits", *SMALL, "--model", "mlp", "--batch-size", "96", "--timeout", "10m", "--eval-every", "0")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Ray]:
    short = tempfile.TemporaryDirectory(prefix="ray", dir="/tmp")  # room for names of sockets
    with short as folder, ray_cluster(Path(folder)) as cluster:
        yield cluster


def _start(runs: Runs, cluster: Ray, *more: str) -> Run:
    place = f'ray(nodes=2, address="{cluster.dashboard}")'
    return runs.start(*SETTINGS, "--on", place, "--workers", "1", *more, folder="there")


def _check_here(runs: Runs, there: Run, *steps: str) -> None:
    here = runs.start(*SETTINGS, *steps, "--workers", "2", folder="here")
    assert here.end() == 0, here.text()
    check_same(here, there)


@pytest.mark.long
def test_the_same_bits_as_here(tmp_path: Path, cluster: Ray) -> None:
    steps = ("--max-steps", "10")
    with Runs(tmp_path) as runs:
        there = _start(runs, cluster, *steps)
        assert there.end() == 0, there.text()
        assert ": running" in there.errors() and "Completed after 10 steps" in there.text()
        _check_here(runs, there, *steps)


@pytest.mark.slow
def test_a_stop_saves_and_is_not_started_again(tmp_path: Path, cluster: Ray) -> None:
    with Runs(tmp_path) as runs:
        there = _start(runs, cluster, "--epochs", "4000")
        there.wait_for_step(5)
        there.process.send_signal(signal.SIGINT)
        assert there.end() == 130, there.text()
        last, saved = there.records("steps")[-1]["step"], there.records("checkpoint")[-1]
        assert saved["step"] == last and saved["reason"] == "stop"


@pytest.mark.slow
def test_a_node_is_lost_and_another_one_added(tmp_path: Path, cluster: Ray) -> None:
    steps = ("--max-steps", "3000", "--checkpoint-every", "50")
    with Runs(tmp_path) as runs:
        there = _start(runs, cluster, *steps)
        there.wait_for_step(200)
        cluster.fail_node("n2")
        there.wait_for(lambda: there.errors().count(": waiting for 2 nodes") > 1, "the queue's word")
        cluster.add_node("n3")
        assert there.end(600) == 0, there.text()
        assert len((there.folder / "place" / "starts").read_text().split()) == 2
        _check_here(runs, there, *steps)
