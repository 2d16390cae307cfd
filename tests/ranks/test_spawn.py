"""The spawn helper itself: results, failures, faults, timeouts and leaks."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from tests.ranks.spawn import Rank, RanksFailed, Struck, fail_at, run_ranks


def total(rank: Rank, start: int) -> tuple[int, float]:
    x = torch.tensor([float(start + rank.index)])
    dist.all_reduce(x)
    return rank.index, x.item()


def raise_on_one(rank: Rank) -> None:
    if rank.index == 1:
        raise ValueError("one is broken")
    dist.barrier()


def hang(rank: Rank) -> None:
    if rank.index == 1:
        time.sleep(60)


def leak(rank: Rank) -> None:
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


def steps(rank: Rank) -> str:
    for step in range(4):
        try:
            rank.reach(step)
            dist.all_reduce(torch.ones(1))
        except RuntimeError as error:
            return f"stopped at {step}: {type(error).__name__}"
    return "ended"


def test_results_come_in_rank_order() -> None:
    assert run_ranks(total, 3, 10) == [(0, 33.0), (1, 33.0), (2, 33.0)]


def test_a_traceback_is_shown() -> None:
    with pytest.raises(RanksFailed, match=r"(?s)rank 1 raised.*ValueError: one is broken"):
        run_ranks(raise_on_one, 2)


@pytest.mark.long
def test_the_time_ends_a_hanging_rank_and_shows_where_it_stood() -> None:
    with pytest.raises(RanksFailed, match=r"(?s)rank 1 was still at.*in hang"):
        run_ranks(hang, 2, timeout_s=6, backend=None)


@pytest.mark.long
def test_a_process_left_behind_is_found() -> None:
    with pytest.raises(RanksFailed, match="rank 0 left a process behind"):
        run_ranks(leak, 1, backend=None)


def test_a_planned_kill_is_seen_by_the_others() -> None:
    killed, survivor = run_ranks(steps, 2, faults=[fail_at(rank=0, step=2)])
    assert killed == Struck("kill")
    assert survivor.startswith("stopped at 2")


def test_a_stopped_rank_leaves_the_others_to_their_deadline() -> None:
    results = run_ranks(steps, 2, faults=[fail_at(rank=1, step=1, how="stop")], group_timeout_s=4)
    assert results == ["stopped at 1: RuntimeError", Struck("stop")]


def test_a_planned_exception() -> None:
    results = run_ranks(steps, 2, faults=[fail_at(0, 1, "raise")])
    assert results[0] == "stopped at 1: PlannedFailure"
