"""A loss that is not finite though the inputs are: one rank sees it, and all leave the batch out of training."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from echelon.data.base import Batch, Shard
from echelon.data.order import local_part
from echelon.records.events import LossNotFinite
from echelon.records.file import read_records
from echelon.trainer.loss_guard import GuardSettings, LossGuard
from tests.ranks.layouts import TASK, HeldTensor, Trainer, Trial, held, make_trainer
from tests.ranks.spawn import Rank, run_ranks

BAD, STEPS = 1, 4  # the last sample of step BAD, which the last rank has, holds a NaN: no source would let it through
TRIALS = [
    Trial("mlp", parallel, {"strategy.sync": sync, "strategy.compression": compression, "training.accumulate": parts})
    for parallel, sync, compression, parts in (
        ("dp=2", "allreduce", "none", 1), ("dp=2", "allreduce", "topk(0.1)", 2), ("dp=2", "allreduce", "powersgd", 1),
        ("dp=2", "local(3, start=9)", "none", 1), ("fsdp=2", "allreduce", "none", 2), ("tp=2", "allreduce", "none", 1),
        ("pp=2,microbatches=2", "allreduce", "none", 1), ("dp=2,zero1", "allreduce", "none", 1),
        ("dp=2", "local(2)", "none", 1),
    )
]  # fmt: skip


def train(rank: Rank, seen: bool) -> list[tuple[list[bool], Mapping[str, HeldTensor], list[str]]]:
    """Train each trial; returns which steps were left out, what this rank holds at the end, and what was recorded."""
    return [_train(make_trainer(trial, rank), rank, seen) for trial in TRIALS]


def _train(trainer: Trainer, rank: Rank, seen: bool) -> Any:
    world, sync = trainer.world, trainer.parts.sync
    settings = GuardSettings(True, rank.folder, rank.index, str)
    trainer.step.guard = LossGuard(TASK, trainer.parts.local_model.parameters(), world, settings)
    left_out = []
    for number in [n for n in range(STEPS) if seen or n != BAD]:
        inputs, targets = trainer.trial.global_batch(number)
        if number == BAD:
            inputs[-1, 0, 0, 0] = torch.nan
        own = local_part(np.arange(len(inputs)), Shard(world.data_rank, world.data_size))
        batch = Batch(inputs[own], targets[own], len(inputs), number, numbers=functools.partial(np.asarray, own))
        result = trainer.step.forward_backward(batch, sync)
        left_out.append(result.left_out)
        (sync.leave_out if result.left_out else sync.step)()
    sync.close()
    return left_out, held(trainer.parts), [event.message for event in read_records(rank.folder, LossNotFinite)]


@pytest.mark.long
def test_all_ranks_go_on_as_if_the_batch_had_never_been() -> None:
    ranks, others = run_ranks(train, 2, True), run_ranks(train, 2, False)
    expected = [step == BAD for step in range(STEPS)]
    for i, trial in enumerate(TRIALS[:-1]):
        assert ranks[0][i][0] == ranks[1][i][0] == expected, trial
        for with_it, without in zip(ranks, others, strict=True):
            for name, piece in with_it[i][1].items():
                assert np.array_equal(piece.values, without[i][1][name].values), (trial, name)
    assert (ranks[0][-1][0], ranks[1][-1][0]) == ([False] * STEPS, expected), "replicas that step alone decide alone"
    assert all(np.isfinite(piece.values).all() for rank in ranks for piece in rank[-1][1].values())
    messages = ranks[0][-1][2]
    assert len([m for m in messages if "rank 1" in m and "sample 7 of the data is NaN" in m]) >= 3, messages
