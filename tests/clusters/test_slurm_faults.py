"""A run on a real Slurm that is preempted, loses nodes and meets its time limit, in an order drawn by a seed."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.clusters.slurm import SlurmCluster, missing, slurm_cluster
from tests.ranks.runs import SMALL, Run, Runs, losses_of

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "there is one")
COUNTS = {
    "preemption": int(os.environ.get("ECHELON_PREEMPTIONS", "6")),
    "node failure": int(os.environ.get("ECHELON_NODE_FAILURES", "6")),
    "time limit": int(os.environ.get("ECHELON_TIME_LIMITS", "4")),
}
STEPS = int(os.environ.get("ECHELON_SLURM_STEPS", "9000"))
EVERY = 50  # steps between checkpoints
FAULT_S = 900.0  # until a run goes on after a fault
SLOW = """\
import time


def wait(image):
    time.sleep(0.002)  # a run that lasts, and hardly computes
    return image
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


def _job(run: Run) -> str:
    return (run.folder / "place" / "jobs").read_text().split()[-1]


def _last_step(run: Run) -> int:
    windows = run.records("steps")
    return int(windows[-1]["step"]) if windows else 0


def _nodes(cluster: SlurmCluster, run: Run) -> list[str]:
    names = cluster.ask("squeue", "-h", "-j", _job(run), "-o", "%N").strip()
    return cluster.ask("scontrol", "show", "hostnames", names).split()


def _preempt(cluster: SlurmCluster, run: Run) -> None:
    cluster.ask("sbatch", "-p", "urgent", "--nodes=3", "--exclusive", "--output=/dev/null", "--wrap", "sleep 1")


def _go_on(cluster: SlurmCluster, run: Run, fault: str, chance: random.Random) -> None:
    """Bring a fault about, and wait until the run has begun again and trained on."""
    begun, step = len(run.records("start")), _last_step(run)
    failed = ""
    if fault == "preemption":
        _preempt(cluster, run)
    elif fault == "node failure":
        failed = chance.choice(_nodes(cluster, run))
        cluster.fail_node(failed)
    run.wait_for(
        lambda: cluster.hurry(_job(run)) or len(run.records("start")) > begun, f"another start after a {fault}", FAULT_S
    )
    if failed:
        cluster.start_node(failed)
    run.wait_for(lambda: _last_step(run) > step, f"steps after a {fault}", FAULT_S)


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
def test_random_faults(tmp_path: Path, cluster: SlurmCluster) -> None:
    chance = random.Random(int(os.environ.get("ECHELON_SEED", "0")))
    faults = [fault for fault, count in COUNTS.items() for _ in range(count)]
    chance.shuffle(faults)
    (tmp_path / "slow.py").write_text(SLOW)
    settings = (
        "train", "digits", *SMALL, "--model", "mlp", "--batch-size", "96", "--max-steps", str(STEPS),
        "--epochs", "10000", "--eval-every", "0", "--checkpoint-every", str(EVERY), "--transform", "slow:wait",
        "--loaders", "0",
    )  # fmt: skip
    with Runs(tmp_path) as runs:
        place = ("--on", "slurm(nodes=2, time=4m, notice=1m)", "--workers", "1", "--trust")
        there = runs.start(*settings, *place, folder="there", environment=cluster.environment)
        there.wait_for(lambda: _last_step(there) >= 10, "the first steps", FAULT_S)
        for fault in faults:
            step = _last_step(there) + chance.randint(1, EVERY)
            there.wait_for(lambda step=step: _last_step(there) >= step, f"step {step}", FAULT_S)
            _go_on(cluster, there, fault, chance)
        assert _last_step(there) < STEPS, "the run was over before the faults were"
        there.wait_for(lambda: cluster.hurry(_job(there)) or there.process.poll() is not None, "the end", 3600)
        assert there.end() == 0, there.text()
        (tmp_path / "slow.py").write_text(SLOW.replace("0.002", "0"))
        here = runs.start(*settings, "--workers", "2", "--trust", folder="here")
        assert here.end(1800) == 0, here.text()
        assert losses_of(there.folder) == losses_of(here.folder)
        _report(there, faults)


def _report(run: Run, faults: list[str]) -> None:
    """Say how many steps were trained again; after a signal none is."""
    trained = sum(len(window["losses"]) for window in run.records("steps"))
    starts = run.records("start")
    stopped = [record["step"] for record in run.records("checkpoint") if record["reason"] == "stop"]
    print(f"\n{len(faults)} faults, {len(starts)} starts, {trained - STEPS} of {STEPS} steps trained again")
    assert len(stopped) >= faults.count("time limit")
    assert trained - STEPS <= EVERY * (len(starts) - 1 - len(stopped))
