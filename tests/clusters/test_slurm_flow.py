"""A flow as jobs of a real Slurm that wait for each other, and outlive the command that follows them."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from echelon.flows.base import step_folder
from echelon.records.file import read_records
from echelon.records.kinds import FlowStepEnd, FlowStepStart
from tests.clusters.slurm import SlurmCluster, missing, slurm_cluster

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing() or "there is one"),
    pytest.mark.timeout(600),
    pytest.mark.long,
]
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


def _wait_for(path: Path) -> None:
    until = time.monotonic() + 180
    while not path.exists():
        assert time.monotonic() < until, f"{path} does not come"
        time.sleep(0.2)


def test_jobs_wait_for_each_other_and_outlive_the_command(tmp_path: Path, cluster: SlurmCluster) -> None:
    (tmp_path / "flow.yaml").write_text(FLOW)
    folder = tmp_path / "there"
    command = [
        sys.executable,
        "-m",
        "echelon",
        "flow",
        str(tmp_path / "flow.yaml"),
        "--run",
        str(folder),
        "--on",
        "slurm",
    ]
    environment = {**os.environ, **cluster.environment}
    follower = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)
    first = step_folder(folder, "first")
    _wait_for(first / "begun")
    follower.kill()  # the jobs go on: the queue holds the order
    follower.communicate(timeout=30)
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
