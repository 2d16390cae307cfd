"""While a sharded model writes, it is gathered once, and not again for each token."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile

from echelon.parallel.blocks import kept_gathered
from echelon.tasks import nest
from tests.laws.test_tasks import TaskTrainer
from tests.ranks.spawn import Rank, run_ranks
from tests.ranks.task_data import language_modelling


def gathered_in(seen: profile) -> int:
    return sum(event.count for event in seen.key_averages() if event.key == "c10d::_allgather_base_")


def gathers(model: nn.Module, passes: int, keep: bool) -> int:
    """Return the collectives of some forward passes."""
    ids = torch.zeros(1, 16, dtype=torch.int64)
    with torch.no_grad(), profile(activities=[ProfilerActivity.CPU]) as seen:
        if keep:
            with kept_gathered(model):
                for _ in range(passes):
                    nest.call(model, ids)
        else:
            for _ in range(passes):
                nest.call(model, ids)
    return gathered_in(seen)


def counted(rank: Rank, settings: Any) -> tuple[list[int], bool, int]:
    trainer = TaskTrainer(rank, ("language_modelling", settings), ("fsdp=2", "allreduce", "none"))
    model = trainer.parts.model
    trainer.run(0, 1)
    counts = [gathers(model, passes, keep) for passes, keep in ((1, False), (5, False), (5, True), (1, False))]
    before = trainer.run(1, 2)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        trainer.evaluation()
    again = TaskTrainer(rank, ("language_modelling", settings), ("fsdp=2", "allreduce", "none"))
    again.run(0, 1)
    same = again.run(1, 2) == before
    for each in (trainer, again):
        each.parts.sync.close()
    dist.barrier()
    return counts, same, gathered_in(seen)


def test_passes_in_a_row_gather_once_and_training_goes_on_as_before(tmp_path: Any) -> None:
    settings = {**language_modelling(tmp_path), "data.root": str(tmp_path / "cache")}
    for counts, same, of_evaluation in run_ranks(counted, 2, settings, timeout_s=100):
        once, five, kept, after = counts
        assert five > 3 * once and kept <= once and after == once, counts
        assert same, "it was gathered in between and trains on with the same bits"
        assert of_evaluation < 100, "240 tokens are written, and would gather all layers each"
