"""Runs on a real Ray of three node processes: the same bits as here; a stop; a node lost and another one added."""

from __future__ import annotations

import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusters.ray import Ray, missing, ray_cluster
from tests.clusters.test_slurm import check_same
from tests.ranks.runs import SMALL, Run, Runs, losses_of

pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing() or "there is one"), pytest.mark.timeout(900)]
SETTINGS = ("train", "digits", *SMALL, "--model", "mlp", "--batch-size", "96", "--timeout", "10m", "--eval-every", "0")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Ray]:
    # Room for names of sockets; Ray may still write there when it is removed.
    short = tempfile.TemporaryDirectory(ignore_cleanup_errors=True, prefix="ray", dir="/tmp")
    with short as folder, ray_cluster(Path(folder)) as cluster:
        yield cluster


SLOW = """\
import time


def wait(image):
    time.sleep(0.0005)  # a run that lasts, and hardly computes
    return image
"""


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


@pytest.mark.slow
def test_of_a_range_it_has_as_many_as_there_are(tmp_path: Path, cluster: Ray) -> None:
    (tmp_path / "slow.py").write_text(SLOW)
    with Runs(tmp_path) as runs:
        there = runs.start(
            *SETTINGS, "--on", f'ray(nodes=1:3, address="{cluster.dashboard}")', "--workers", "1",
            "--max-steps", "3000", "--epochs", "1000", "--checkpoint-every", "50", "--transform", "slow:wait",
            "--loaders", "0", "--trust", folder="there",
        )  # fmt: skip
        there.wait_for_step(100)
        cluster.fail_node(sorted(name for name in cluster.nodes if name != "head")[0])
        there.wait_for(lambda: len(there.records("start")) == 2, "a start on what is left")
        begun = there.records("start")[-1]
        there.wait_for_step(300, begun["t"])
        cluster.add_node("n4")
        there.wait_for(lambda: len(there.records("start")) == 3, "a start with the new one")
        assert there.end(600) == 0, there.text()
        assert [len(start["pids"]) for start in there.records("start")] == [2, 1, 2]
        joined = there.records("start")[-1]
        saved = [record for record in there.records("checkpoint") if record["t"] < joined["t"]][-1]
        before = [record for record in there.records("steps") if record["t"] < joined["t"]][-1]
        assert saved["step"] == before["step"] and saved["reason"] == "stop"  # nothing is done again
        assert sorted(losses_of(there.folder)) == list(range(1, 3001))


FLOW = """\
steps:
  first:
    command: [sh, -c, "echo 1 >${folder}/out.txt"]
    outputs: {text: out.txt}
  after:
    command: [sh, -c, "cat ${first.text} >${folder}/out.txt; echo ${n} >>${folder}/out.txt"]
    matrix: {n: [2, 3]}
    outputs: {text: out.txt}
  wrong:
    command: [sh, -c, "exit 3"]
    needs: [after]
  never:
    command: [sh, -c, "exit 0"]
    needs: [wrong]
"""


@pytest.mark.slow
def test_steps_of_a_flow_are_jobs(tmp_path: Path, cluster: Ray) -> None:
    (tmp_path / "flow.yaml").write_text(FLOW)
    words = ("flow", tmp_path / "flow.yaml", "--run", tmp_path / "there", "--on", f'ray(address="{cluster.dashboard}")')
    with Runs(tmp_path) as runs:
        once = runs.start(*words)
        assert once.end() == 1, once.text()
        for n in (2, 3):
            assert (tmp_path / "there" / "steps" / "after" / f"n={n}" / "out.txt").read_text() == f"1\n{n}\n"
        assert "wrong: ended: failed" in once.text() and "never: job" not in once.text()
        again = runs.start(*words)
        assert again.end() == 1, again.text()
        assert "after[n=2]: kept" in again.text() and "wrong: job" in again.text()
