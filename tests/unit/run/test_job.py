"""Environments of processes: what NCCL and gloo read before anything of ours runs."""

from __future__ import annotations

from pathlib import Path

from echelon.config.validate import parse_nodes
from echelon.launch.plan import LaunchPlan
from echelon.run.job import ServerPart, ranks_job, server_job


def plan(tmp_path: Path, workers: int) -> LaunchPlan:
    """Return a plan of this machine."""
    return LaunchPlan("module:function", ("run",), workers, 1, parse_nodes("1"), None, 0, tmp_path)


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
