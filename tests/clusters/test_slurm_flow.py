"""A flow as jobs of a real Slurm that wait for each other, and outlive the command that follows them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from benchmarks.flow import compare, write_flow

from echelon.flows.base import step_folder
from echelon.records.file import read_records
from echelon.records.kinds import Checkpoint, FlowStepEnd, FlowStepStart
from tests.clusters.slurm import SlurmCluster, missing, slurm_cluster

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing() or "there is one"),
    pytest.mark.timeout(600),
]
ECHELON = [sys.executable, "-m", "echelon"]
FLOW = """\
steps:
  first:
    command: [sh, -c, "touch ${folder}/begun; while ! test -e GO; do sleep 0.2; done; echo 1 >${folder}/out.txt"]
    outputs: {text: out.txt}
  wrong:
    command: [sh, -c, "exit 3"]
    outputs: {text: out.txt}
  after:
    command: [sh, -c, "cat ${first.text} >${folder}/out.txt; echo ${n} >>${folder}/out.txt"]
    matrix: {n: [2, 3]}
    outputs: {text: out.txt}
  never:
    command: [sh, -c, "cat ${wrong.text}"]
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


def _flow(base: Path, folder: Path) -> list[str]:
    """Return the command that does the flow."""
    return [*ECHELON, "flow", str(base / "flow.yaml"), "--run", str(folder), "--on", "slurm"]


def _wait_for(path: Path) -> None:
    _wait_until(path.exists, str(path))


def _wait_until(is_there: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + 400
    while not is_there():
        assert time.monotonic() < until, f"{what} does not come"
        time.sleep(0.2)


@pytest.mark.long
def test_jobs_wait_for_each_other_and_outlive_the_command(tmp_path: Path, cluster: SlurmCluster) -> None:
    (tmp_path / "flow.yaml").write_text(FLOW)
    folder = tmp_path / "there"
    command, environment = _flow(tmp_path, folder), {**os.environ, **cluster.environment}
    follower = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    first = step_folder(folder, "first")
    _wait_for(first / "begun")
    follower.kill()  # the jobs go on: the queue holds the order
    follower.communicate(timeout=30)
    shown = subprocess.run(
        [*ECHELON, "flow", "status", str(folder)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert re.search(r"first +command +runs", shown.stdout), shown.stdout + shown.stderr
    second = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert second.stdout is not None and "goes on" in second.stdout.readline()
    (tmp_path / "GO").touch()
    said, _ = second.communicate(timeout=400)
    assert second.returncode == 1 and "1 failed, 1 blocked" in said, said
    for name, text in (("after[n=2]", "1\n2\n"), ("after[n=3]", "1\n3\n")):
        where = step_folder(folder, name)
        assert (where / "out.txt").read_text() == text
        assert [end.status for end in read_records(where, FlowStepEnd)] == ["completed"]
    assert len(read_records(first, FlowStepStart)) == 1 and len(read_records(first, FlowStepEnd)) == 1


@pytest.mark.long
def test_jobs_that_nobody_follows_are_ended_and_the_flow_resumed_as_jobs(tmp_path: Path, cluster: SlurmCluster) -> None:
    (tmp_path / "flow.yaml").write_text(FLOW)
    folder = tmp_path / "there"
    environment = {**os.environ, **cluster.environment}
    follower = subprocess.Popen(_flow(tmp_path, folder), env=environment, stdout=subprocess.PIPE, text=True)
    _wait_for(step_folder(folder, "first") / "begun")
    follower.kill()
    follower.communicate(timeout=30)
    stop = [*ECHELON, "flow", "stop", str(folder)]
    said = subprocess.run(stop, env=environment, capture_output=True, text=True, timeout=120)
    assert said.returncode == 0 and "the jobs of" in said.stdout, said.stdout + said.stderr
    _wait_until(lambda: not cluster.ask("squeue", "-h"), "the end of all jobs")
    assert [end.status for end in read_records(step_folder(folder, "first"), FlowStepEnd)] == ["stopped"]
    (tmp_path / "GO").touch()
    again = [*ECHELON, "flow", "--resume", str(folder)]  # where it was, without --on
    said = subprocess.run(again, env=environment, capture_output=True, text=True, timeout=400)
    assert "first: job" in said.stdout and "1 failed, 1 blocked" in said.stdout, said.stdout + said.stderr
    assert (step_folder(folder, "after[n=3]") / "out.txt").read_text() == "1\n3\n"


LASTING = """\
steps:
  train:
    train: digits
    settings: {model: mlp, epochs: 10000, max_steps: ${steps}, workers: 1, checkpoint_every: 20, eval_every: 0}
  check:
    evaluate: ${train.run}
    settings: {workers: 1}
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_a_training_goes_on_after_its_node_has_failed(tmp_path: Path, cluster: SlurmCluster) -> None:
    (tmp_path / "flow.yaml").write_text(LASTING.replace("${steps}", "600"))
    folder, environment = tmp_path / "there", {**os.environ, **cluster.environment}
    follower = subprocess.Popen(_flow(tmp_path, folder), env=environment, stdout=subprocess.PIPE, text=True)
    train = step_folder(folder, "train")
    _wait_until(lambda: (train / "run").is_dir() and bool(read_records(train / "run", Checkpoint)), "a checkpoint")
    node = cluster.ask("squeue", "-h", "-t", "R", "-o", "%N").split()[0]
    cluster.fail_node(node)
    _wait_until(lambda: len(read_records(train, FlowStepStart)) == 2, "another start")  # after two minutes
    cluster.start_node(node)
    said, _ = follower.communicate(timeout=600)
    assert follower.returncode == 0, said
    starts, ends = read_records(train, FlowStepStart), read_records(train, FlowStepEnd)
    assert [start.goes_on for start in starts] == [False, True] and [end.status for end in ends] == ["completed"]
    assert [end.status for end in read_records(step_folder(folder, "check"), FlowStepEnd)] == ["completed"]
    here = [*ECHELON, "flow", str(tmp_path / "flow.yaml"), "--run", str(tmp_path / "here")]
    subprocess.run(here, check=True, timeout=600, stdout=subprocess.DEVNULL)
    calm = read_records(step_folder(tmp_path / "here", "train"), FlowStepEnd)
    assert calm[0].outputs == ends[0].outputs


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_the_six_steps_with_a_failed_node_leave_what_they_do_here(tmp_path: Path, cluster: SlurmCluster) -> None:
    """Of benchmarks/flow.py, on digits; CIFAR_FLOW names a folder with train/ and test/ for its images."""
    write_flow(tmp_path, os.environ.get("CIFAR_FLOW", ""), 60)
    here = [*ECHELON, "flow", str(tmp_path / "flow.yaml"), "--run", str(tmp_path / "flow")]
    subprocess.run(here, check=True, timeout=1000, stdout=subprocess.DEVNULL)
    (tmp_path / "flow").rename(tmp_path / "calm")
    folder = tmp_path / "flow"
    follower = subprocess.Popen(
        _flow(tmp_path, folder), env={**os.environ, **cluster.environment}, stdout=subprocess.PIPE, text=True
    )
    trainings = [step_folder(folder, f"pretrain[seed={seed}]") for seed in (0, 1)]
    _wait_until(lambda: any(read_records(each, FlowStepStart) for each in trainings if each.is_dir()), "a training")
    node = cluster.ask("squeue", "-h", "-t", "R", "-o", "%N").split()[0]
    cluster.fail_node(node)
    _wait_until(lambda: any(len(read_records(e, FlowStepStart)) == 2 for e in trainings if e.is_dir()), "another start")
    cluster.start_node(node)
    said, _ = follower.communicate(timeout=1000)
    assert follower.returncode == 0, said
    found = compare(tmp_path, 1)
    assert not found.not_once and not found.different and found.starts > 13, found
