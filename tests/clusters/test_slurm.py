"""Runs on a real Slurm of three nodes: the same bits as here, and a stop, a preemption and a time limit survived."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from echelon.checkpoint import CheckpointStore
from echelon.launch.places.cluster import PlaceFiles
from echelon.messages.identity import SECRET_FILE
from echelon.records.file import read_records
from echelon.records.kinds import End, Start, Steps
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


def _study(runs: Runs, cluster: SlurmCluster, *more: str) -> Run:
    return runs.start("compare", *more, "--run", "study", folder="study", environment=cluster.environment)


def _running(cluster: SlurmCluster) -> int:
    return cluster.ask("squeue", "-h", "-t", "RUNNING", "-o", "%i").count("\n")


@pytest.mark.slow
def test_a_study_is_an_array_of_which_each_run_is_queued_again(tmp_path: Path, cluster: SlurmCluster) -> None:
    given = ("digits", *SMALL, "--model", "mlp", "--workers", "1", "--max-steps", "400", "--seeds", "2")
    given += ("--eval-every", "0", "--epochs", "1000", "--try", "sync=allreduce", "--try", "compression=int8")
    with Runs(tmp_path) as runs:
        study = _study(runs, cluster, *given, "--on", "slurm(nodes=1)", "--at-once", "2")
        study.wait_for(lambda: "as an array, at most 2 at once" in study.text(), "the array")
        first = next(iter(sorted((study.folder / "runs").iterdir())))
        study.wait_for(lambda: read_records(first, Steps), "a step")
        study.wait_for(lambda: _running(cluster) == 2, "two at once")
        job = PlaceFiles(first).job()
        assert job.endswith("_0")
        cluster.ask("scancel", "--batch", "--signal=TERM", job)  # as its time limit does
        study.wait_for(lambda: len(read_records(first, Start)) == 2 or cluster.hurry(job), "another start")
        study.process.kill()  # the queue has the runs
        study.process.wait()
        again = _study(runs, cluster)
        most = 0
        while again.process.poll() is None:
            most = max(most, _running(cluster))
            time.sleep(0.2)
        assert again.end() == 0, again.text()
        assert most <= 2 and "since an earlier command: " in again.text()
        ends = read_ends(study.folder)
        assert len(ends) == 4 and {end.status for end in ends.values()} == {"completed"}, again.text()
        assert [len(read_records(first, kind)) for kind in (Start, End)] == [2, 2]
        assert (study.folder / "report.html").exists() and "several went on at once" in again.text()


@pytest.mark.slow
def test_a_study_that_is_stopped_leaves_no_run_in_the_queue(tmp_path: Path, cluster: SlurmCluster) -> None:
    given = ("digits", *SMALL, "--model", "mlp", "--workers", "1", "--epochs", "4000", "--seeds", "4")
    with Runs(tmp_path) as runs:
        study = _study(runs, cluster, *given, "--try", "sync=allreduce", "--on", "slurm(nodes=1)", "--at-once", "1")
        first = study.folder / "runs"
        study.wait_for(lambda: any(read_records(run, Steps) for run in first.glob("*")), "a step")
        shown = runs.start("runs", str(first), environment=cluster.environment)
        assert shown.end() == 0 and shown.text().count("waiting for 1 node (JobArrayTaskLimit") == 3, shown.text()
        study.process.send_signal(signal.SIGINT)
        assert study.end() == 130, study.text()
        assert cluster.ask("squeue", "-h", "-o", "%i") == ""
        assert [any(run.glob("checkpoints/step-*")) for run in sorted(first.glob("*"))] == [True, False, False, False]


@pytest.mark.slow
def test_a_run_of_an_array_is_followed_and_stopped_by_itself(tmp_path: Path, cluster: SlurmCluster) -> None:
    given = ("digits", *SMALL, "--model", "mlp", "--workers", "1", "--max-steps", "900", "--seeds", "2")
    given += ("--eval-every", "0", "--epochs", "1000", "--try", "sync=allreduce", "--try", "compression=int8")
    with Runs(tmp_path) as runs:
        study = _study(runs, cluster, *given, "--on", "slurm(nodes=1)", "--at-once", "2")
        folder = study.folder / "runs"
        study.wait_for(lambda: sum(bool(read_records(run, Steps)) for run in folder.glob("*")) == 2, "two at once")
        first, second = [run for run in sorted(folder.glob("*")) if read_records(run, Steps)]
        there = cluster.environment
        followed = runs.start("logs", str(second), "-f", folder="followed", environment=there)
        watched = runs.start("watch", str(second), folder="watched", environment=there)
        stopped = runs.start("stop", str(first), folder="stopped", environment=there)
        assert stopped.end() == 0, stopped.text()
        study.wait_for(lambda: read_records(first, End), "the end of the one that is stopped")
        assert [end.status for end in read_records(first, End)] == ["stopped"]
        assert not any(end.status == "stopped" for end in read_records(second, End))
        logged = runs.start("logs", str(first), folder="logged", environment=there)
        assert logged.end() == 0 and "epoch 1/1000" in logged.text(), logged.text()
        study.end()
        assert "3 of 4 runs completed" in study.text() and "1 stopped" in study.text(), study.text()
        assert followed.end() == watched.end() == 0, (followed.text(), watched.text())
        assert [end.status for end in read_records(second, End)] == ["completed"]
        assert "epoch 75/1000" in followed.text() and "step 900/900" in watched.text()
