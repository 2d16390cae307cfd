"""Every rank's own state, of unequal size and kind, reaches rank 0, the disk, and its rank again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import echelon.checkpoint.ranks as ranks_module
from echelon.checkpoint import RANKS, CheckpointStore, gather_rank_state, pick_rank_state
from echelon.core.state_tree import StateView
from tests.ranks.spawn import Rank, run_ranks
from tests.unit.checkpoint.states import assert_same


def own_state(rank: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(rank)
    memory = torch.randn(1 + 700 * rank, generator=generator)
    kinds = [torch.ones(3, dtype=torch.bool), torch.randn(2, 3, generator=generator).t(), torch.tensor(float("nan"))]
    return {
        "rng": generator.get_state(),
        "memory": {"odd": torch.arange(rank, dtype=torch.uint8), "big": memory.double()},
        "kinds": kinds[:rank],
        "seed": rank,
        "name": "ü" * rank,
    }


def gather(rank: Rank, chunk_bytes: int) -> dict[int, StateView]:
    ranks_module._CHUNK_BYTES = chunk_bytes
    return gather_rank_state(own_state(rank.index))


def test_states_of_unequal_size_reach_rank_0_in_chunks() -> None:
    for chunk_bytes in (1 << 20, 1000):
        first, second, third = run_ranks(gather, 3, chunk_bytes)
        assert (second, third) == ({}, {})
        assert_same({rank: own_state(rank) for rank in range(3)}, first)


def gather_in_pair(rank: Rank) -> dict[int, StateView]:
    dist.barrier()  # rank 0 ends at once: not before the others have connected to it
    pair = dist.new_group([1, 2])
    return {} if rank.index == 0 else gather_rank_state({"rank": rank.index, "none": torch.empty(0)}, pair)


def test_the_ranks_are_those_of_the_group() -> None:
    outside, first, second = run_ranks(gather_in_pair, 3)
    assert outside == second == {}
    assert_same({rank: {"rank": rank + 1, "none": torch.empty(0)} for rank in range(2)}, first)


def save_and_load(rank: Rank, folder: Path) -> StateView:
    parts = gather_rank_state(own_state(rank.index))
    if rank.index == 0:
        store = CheckpointStore(folder, keep=1)
        store.save(5, {"shared": torch.ones(2), RANKS: parts})
        store.close()
    dist.barrier()
    newest = CheckpointStore(folder, keep=1).newest(rank=rank.index)
    assert newest is not None and newest[0] == 5
    assert list(newest[1][RANKS]) == [rank.index]
    return pick_rank_state(newest[1], rank.index)


def test_each_rank_reads_its_own_part_back(tmp_path: Path) -> None:
    for rank, state in enumerate(run_ranks(save_and_load, 2, tmp_path)):
        assert_same(own_state(rank), state)


def fail_on_one(rank: Rank) -> str:
    rank.reach(step=0)
    try:
        gather_rank_state(own_state(rank.index))
    except RuntimeError:
        return "ended"
    return "gathered"


def test_a_dead_rank_does_not_hang_the_gathering() -> None:
    from tests.ranks.spawn import Struck, fail_at

    results = run_ranks(fail_on_one, 2, faults=[fail_at(rank=1, step=0)])
    assert results == ["ended", Struck("kill")]
