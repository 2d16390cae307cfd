"""Environments of processes: what NCCL and gloo read before anything of ours runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from echelon.config.validate import parse_nodes
from echelon.core.errors import UserError
from echelon.launch.noticeboard import NoticeBoard
from echelon.launch.plan import LaunchPlan
from echelon.observe.notes import VARIABLE
from echelon.ps.worker_rank import WorkerRank
from echelon.run.job import RANK, ServerPart, another_worker, ranks_job, server_job


def plan(tmp_path: Path, workers: int) -> LaunchPlan:
    """Return a plan of this machine."""
    return LaunchPlan(RANK, ("run",), workers, 1, parse_nodes("1"), None, 0, tmp_path)


def test_gloo_and_nccl_take_the_same_interface_between_machines(tmp_path: Path) -> None:
    [group] = ranks_job(plan(tmp_path, 2), interface="eth7").groups
    for process in group.processes:
        assert process.environment["GLOO_SOCKET_IFNAME"] == "eth7"
        assert process.environment["NCCL_SOCKET_IFNAME"] == "=eth7"  # of that name, not of those that begin with it


def test_processes_of_a_split_worker_have_their_own_local_rank(tmp_path: Path) -> None:
    """NCCL binds the device of `LOCAL_RANK`; without one, all of them would bind the first."""
    groups = server_job(plan(tmp_path, 4), ServerPart(ranks=2, workers=2, servers=(0,))).groups
    split = [process for group in groups for process in group.processes if process.name.startswith("worker")]
    assert [process.environment["LOCAL_RANK"] for process in split] == ["0", "1", "2", "3"]


def test_more_workers_than_a_job_begins_with(tmp_path: Path) -> None:
    rank = another_worker(ranks_job(plan(tmp_path, 2)), tmp_path, 1, batch_size=8, gpus=0)
    assert (rank.name, Path(rank.log)) == ("rank3", tmp_path / "rank3.out")
    beside_one = another_worker(ranks_job(plan(tmp_path, 1)), tmp_path, 0, batch_size=8, gpus=0)
    assert Path(beside_one.log) == tmp_path / "rank1.out"  # whose own output is the run's
    served = server_job(plan(tmp_path, 2), ServerPart(ranks=1, workers=4, servers=(0,)))  # of two machines
    worker = another_worker(served, tmp_path, 0, batch_size=0, gpus=0)
    assert worker.name == "worker4" and worker.args[1] == WorkerRank(4, 2, workers=4) and not worker.stops_on_signal


@pytest.mark.parametrize(
    ("part", "batch_size", "gpus", "reason"),
    [
        (ServerPart(ranks=1, workers=2, servers=(0,)), 2, 0, "--batch-size 2 gives 3 workers less than a sample"),
        (ServerPart(ranks=1, workers=2, servers=(0,)), 0, 2, "this machine has 2"),
        (ServerPart(ranks=2, workers=1, servers=(0,)), 0, 0, "a worker is several processes"),
        (ServerPart(ranks=1, workers=4, machine=1, first_worker=2), 0, 0, "only the first machine"),
    ],
)
def test_workers_that_cannot_come(part: ServerPart, batch_size: int, gpus: int, reason: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=reason):
        another_worker(server_job(plan(tmp_path, 2), part), tmp_path, 0, batch_size, gpus)


def test_who_comes_has_a_place_for_its_notes(tmp_path: Path) -> None:
    job = ranks_job(plan(tmp_path, 2))
    board = NoticeBoard(["rank0", "rank1"])
    try:
        known = [p.environment[VARIABLE] for group in board.noted(job).groups for p in group.processes]
        more = board.add(another_worker(job, tmp_path, 0, batch_size=0, gpus=0))
        assert more.environment[VARIABLE] not in known and board.note("rank2", 1) is None
    finally:
        board.close()
