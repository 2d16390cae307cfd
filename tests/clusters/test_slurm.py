"""Runs on a real Slurm of three nodes: the same bits as here, and a stop, a preemption and a time limit survived."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from echelon.checkpoint import CheckpointStore
from echelon.messages.identity import SECRET_FILE
from echelon.study.folder import read_ends
from tests.clusters.slurm import SlurmCluster, missing, slurm_cluster
from tests.ranks.runs import SMALL, Run, Runs, losses_of

pytestmark = [
    pytest.mark.skipif(bool(missing()), reason=missing() or "there is one"),
    pytest.mark.timeout(900),
]
SETTINGS = ("train", "digits", *SMALL, "--model", "mlp", "--batch-size", "96", "--timeout", "10m")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


def _start(runs: Runs, cluster: SlurmCluster, place: str, *more: str, folder: str = "there") -> Run:
    given = ("--on", place, "--workers", "1", *more)
    return runs.start(*SETTINGS, *given, folder=folder, environment=cluster.environment)


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    newest = CheckpointStore(folder / "checkpoints", keep=1).newest()
    assert newest is not None
    return {name: value for name, value in newest[1]["model"].items() if isinstance(value, torch.Tensor)}


def check_same(here: Run, there: Run) -> None:
    """Check that two runs have the same losses and the same weights, bit by bit."""
    assert losses_of(there.folder) == losses_of(here.folder)
    ours, theirs = _tensors(here.folder), _tensors(there.folder)
    assert ours and ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def _check_no_secret(cluster: SlurmCluster, run: Run) -> None:
    """Look for the run's secret in all that a place keeps, shows and logs."""
    secret = (run.folder / "machines" / SECRET_FILE).read_text().strip()
    for folder in (run.folder / "logs", run.folder / "place", cluster.folder / "state", cluster.folder / "log"):
        found = [file for file in folder.rglob("*") if file.is_file() and secret.encode() in file.read_bytes()]
        assert found == [] and len(secret) == 64
    assert secret not in run.text()


@pytest.mark.long
def test_the_same_bits_as_here(tmp_path: Path, cluster: SlurmCluster) -> None:
    steps = ("--max-steps", "10", "--eval-every", "0")
    with Runs(tmp_path) as runs:
        there = _start(runs, cluster, "slurm(nodes=2, time=1h)", *steps)
        assert there.end() == 0, there.text()
        here = runs.start(*SETTINGS, *steps, "--workers", "2", folder="here")
        assert here.end() == 0, here.text()
        check_same(here, there)
        _check_no_secret(cluster, there)
        assert "running on n[1-2]" in there.text() and "Completed after 10 steps" in there.text()
        refused = _start(runs, cluster, 'slurm(nodes=2, extra="--ntasks=3 --ntasks-per-node=2")', folder="refused")
        assert refused.end() == 2 and "the allocation has 3 tasks, --on asks for 2" in refused.errors(), refused.text()


@pytest.mark.long
def test_a_stop_saves_and_is_not_queued_again(tmp_path: Path, cluster: SlurmCluster) -> None:
    with Runs(tmp_path) as runs:
        there = _start(runs, cluster, "slurm(nodes=2)", "--epochs", "400", "--eval-every", "0")
        there.wait_for_step(5)
        there.process.send_signal(signal.SIGINT)
        assert there.end() == 130, there.text()
        last, saved = there.records("steps")[-1]["step"], there.records("checkpoint")[-1]
        assert saved["step"] == last and saved["reason"] == "stop"
        assert "completed" not in cluster.state((there.folder / "place" / "jobs").read_text().split()[-1]).lower()


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [2, 3])
def test_the_same_bits_on_all_nodes_with_an_interruption(tmp_path: Path, cluster: SlurmCluster, nodes: int) -> None:
    steps = ("--max-steps", "200", "--eval-every", "0")
    with Runs(tmp_path) as runs:
        there = _start(runs, cluster, f"slurm(nodes={nodes}, time=1h)", *steps)
        there.wait_for_step(10)
        job = (there.folder / "place" / "jobs").read_text().split()[-1]
        cluster.ask("scancel", "--batch", "--signal=TERM", job)  # as the time limit does
        assert there.end(600) == 0, there.text()
        here = runs.start(*SETTINGS, *steps, "--workers", str(nodes), folder="here")
        assert here.end() == 0, here.text()
        check_same(here, there)
        assert len([r for r in there.records("checkpoint") if r["reason"] == "stop"]) == 1


@pytest.mark.slow
def test_runs_of_a_study_go_on_at_once(tmp_path: Path, cluster: SlurmCluster) -> None:
    given = ("compare", "digits", *SMALL, "--model", "mlp", "--workers", "1", "--max-steps", "10", "--seeds", "2")
    tries = ("--try", "sync=allreduce", "--try", "compression=int8")
    with Runs(tmp_path) as runs:
        study = runs.start(
            *given, *tries, "--on", "slurm(nodes=1)", "--at-once", "3", "--run", "study", folder="study",
            environment=cluster.environment,
        )  # fmt: skip
        most = 0
        while study.process.poll() is None:
            most = max(most, cluster.ask("squeue", "-h", "-t", "RUNNING", "-o", "%i").count("\n"))
            time.sleep(0.2)
        assert study.end() == 0, study.text()
        assert 1 < most <= 3 and "up to 3 at once" in study.text()
        ends = read_ends(study.folder)
        assert len(ends) == 4 and {end.status for end in ends.values()} == {"completed"}
        assert (study.folder / "report.html").exists() and "several went on at once" in study.text()
