"""Runs of a study as an array: handed over together, each followed by its own job, found again, taken away."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from echelon.launch.places.cluster import PlaceFiles
from echelon.study import from_tries, planned_runs
from echelon.study.array import QueuedRun, QueuedRuns, array_cluster
from echelon.study.base import PlannedRun

SLURM = {
    "sbatch": 'echo "$@" >>"$0.given"; echo $((11 + $(wc -l <"$0.given")))',
    "squeue": 'cat "$0.says"',
    "scancel": 'echo "$@" >>"$0.given"; sed -i "s/^${@: -1}|[A-Z]*/${@: -1}|CANCELLED/" "${0%/*}/squeue.says"',
}


@pytest.fixture
def queue(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file with what the queue says."""
    (tmp_path / "bin").mkdir()
    for name, does in SLURM.items():
        program = tmp_path / "bin" / name
        program.write_text(f"#!/bin/bash\n{does}\n")
        program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    for name, value in {"ASK_S": 0.0, "SETTLE_S": 0.0, "POLL_S": 0.0}.items():
        monkeypatch.setattr(f"echelon.study.array.{name}", value)
    return tmp_path / "bin" / "squeue.says"


def _runs(*tries: str) -> list[PlannedRun]:
    base = {"data.source": "digits", "model.name": "mlp", "launch.on": "slurm(nodes=1)", "launch.workers": "1"}
    return list(planned_runs(from_tries(base, tries, "1")))


def _says(queue: Path, *words: str, more: str = "") -> None:
    queue.write_text("".join(f"12_{number}|{word}||n1|N/A\n" for number, word in enumerate(words)) + more)


def _handed_over(path: Path, runs: list[PlannedRun]) -> tuple[QueuedRuns, str]:
    cluster = array_cluster(runs)
    assert cluster is not None
    return QueuedRuns.handed_over(path, runs, cluster, at_once=2)


def _names(runs: list[QueuedRun]) -> list[str]:
    return [each.run.candidate for each in runs]


def test_only_runs_of_one_place_that_takes_arrays_are_one() -> None:
    assert array_cluster(_runs("sync=allreduce", "sync=local(8)")) is not None
    assert array_cluster(_runs("sync=allreduce", "on=slurm(nodes=2)")) is None
    assert array_cluster(_runs("on=ray(nodes=2)")) is None


def test_each_run_is_followed_by_its_own_job_and_one_that_is_refused_stops_no_other(
    tmp_path: Path, queue: Path
) -> None:
    runs = _runs("sync=allreduce", "optimizer=sgdd", "sync=local(8)")
    queued, words = _handed_over(tmp_path, runs)
    assert words == "jobs 12_0 to 12_1: 2 runs as an array, at most 2 at once"
    assert "--array=0-1%2" in (tmp_path / "output" / "array.sh").read_text()
    assert [each.files.job() for each in queued.going] == ["12_0", "", "12_1"]
    _says(queue, "RUNNING", "PENDING")
    begun, over = queued.look()
    assert _names(begun) == ["sync=allreduce"] and _names(over) == ["optimizer=sgdd"]
    assert "sgdd" in over[0].refused and not over[0].folder.exists()
    PlaceFiles(begun[0].folder).end(0)
    _says(queue, "COMPLETED", "RUNNING")
    begun, over = queued.look()
    assert _names(begun) == ["sync=local(8)"] and over[0].outcome() == (0, "")
    _says(queue, "COMPLETED", "FAILED")
    (last,) = queued.look()[1]
    assert last.outcome() == (1, "failed on n1") and queued.going == []


def test_what_the_queue_still_has_is_followed_again_and_a_stop_takes_it_away(tmp_path: Path, queue: Path) -> None:
    runs = _runs("sync=allreduce", "sync=local(8)")
    _handed_over(tmp_path, runs)
    _says(queue, "PENDING", "FAILED")
    queued, words = _handed_over(tmp_path, runs)
    assert words.startswith("since an earlier command: 1 run; jobs 13_0 to 13_0: 1 run")
    assert len((queue.parent / "sbatch.given").read_text().splitlines()) == 2
    _says(queue, "PENDING", "FAILED", more="13_0|PENDING|||N/A\n")
    queued.stop()
    assert queued.going == []
    assert (queue.parent / "scancel.given").read_text().split() == ["13_0", "12_0"]
    assert all(PlaceFiles(tmp_path / "runs" / run.name).stop.exists() for run in runs)
