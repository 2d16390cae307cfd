"""Law 1 for masks: batches are divided by the pixels that count on all ranks, however unevenly ranks have them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from echelon.config import build
from echelon.data.base import Batch, DataInfo, Shard
from echelon.data.order import local_part
from echelon.models import ModelInput
from echelon.models.builtin import small_unet
from echelon.observe.phases import HostClock
from echelon.run.resolve import resolve
from echelon.tasks.base import TaskSettings
from echelon.tasks.nest import TensorSpec
from echelon.tasks.segmentation import Segmentation
from echelon.trainer.parts import build_parts
from echelon.trainer.state import seed_everything
from echelon.trainer.step import Step, StepSettings
from echelon.trainer.work import Work
from tests.ranks.layouts import HeldTensor, assemble, held, make_world
from tests.ranks.spawn import Rank, run_ranks

SIDE = 16
SIZES = (4, 3, 4, 1)
INFO = DataInfo("masks", ("a", "b", "c"), 3, SIDE, 16, 4, (9, 9, 9), targets=TensorSpec((SIDE, SIDE), "int64"))
LAYOUTS = (("dp=2", "allreduce"), ("dp=2", "local(1)"), ("fsdp=2", "allreduce"), ("tp=2", "allreduce"))
Learnt = tuple[list[float], dict[str, HeldTensor], Mapping[str, float | None]]


def global_batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return images and masks; the last ones of a batch are ignored nearly or wholly, so that ranks count unevenly."""
    draw = torch.Generator().manual_seed(number)
    images = torch.randn(SIZES[number], 3, SIDE, SIDE, generator=draw, dtype=torch.float64)
    masks = torch.randint(0, 3, (SIZES[number], SIDE, SIDE), generator=draw)
    masks[-1, 2:] = -100
    if number == 2:
        masks[2:] = -100
    return images, masks


def learn(rank: Rank | None, layouts: Sequence[tuple[str, str]]) -> list[Learnt]:
    """Train on the same global batches in each layout; returns losses, what is held, and metrics of the last batch."""
    return [_learn(rank, *layout) for layout in layouts]


def _learn(rank: Rank | None, parallel: str, sync: str) -> Learnt:
    settings: dict[str, Any] = {"optimizer.name": "momentum", "optimizer.momentum": 0.0, "optimizer.lr": 0.05}
    settings |= {"strategy.parallel": parallel, "strategy.sync": sync, "data.batch_size": max(SIZES)}
    config = build(None, settings).config
    world, clock = make_world(config, rank), HostClock()
    seed_everything(0)
    model = small_unet.build(ModelInput(3, 3, SIDE)).double()
    task = Segmentation().fitted(INFO, TaskSettings())
    parts = build_parts(resolve(config), Work(INFO, task, model, global_batch(0)[0][:2]), world, clock)
    step_settings = StepSettings(world.device, None, 1, 0.0, False, world.data_group)
    step, metrics, losses = Step(task, step_settings, clock, parts.scaler, parts.split), task.metrics(world.device), []
    batches = [_part(number, Shard(world.data_rank, world.data_size)) for number in range(len(SIZES))]
    for number, batch in enumerate(batches):
        if number % 2 == 0:  # of every other batch, units are asked for a step ahead
            step.begin_count(batches[number + 1])
        result = step.forward_backward(batch, parts.sync)
        loss = result.loss.double() * world.counts
        if world.group is not None:
            dist.all_reduce(loss)
        parts.sync.step()
        losses.append(float(loss))
        assert isinstance(batch.inputs, torch.Tensor)
        metrics.update(batch.inputs, batch.targets)  # three channels: as if they were logits of the three classes
    parts.sync.close()
    return losses, held(parts), metrics.compute(world.data_group).metrics


def _part(number: int, shard: Shard) -> Batch:
    images, masks = global_batch(number)
    own = torch.from_numpy(local_part(np.arange(SIZES[number]), shard))
    return Batch(images[own], masks[own], SIZES[number], number)


@pytest.mark.long
def test_two_ranks_learn_what_one_process_does() -> None:
    ranks = run_ranks(learn, 2, LAYOUTS)
    ((expected, whole, metrics),) = learn(None, [("dp=1", "allreduce")])
    parameters = assemble([whole])
    for i, layout in enumerate(LAYOUTS):
        assert np.allclose(ranks[0][i][0], expected, rtol=0, atol=1e-9), layout
        found = assemble([rank[i][1] for rank in ranks])
        assert all(np.abs(found[n] - parameters[n]).max() < 1e-9 for n in parameters), layout
        if layout[0] != "tp=2":
            assert all(rank[i][2] == pytest.approx(metrics, abs=1e-6) for rank in ranks), layout
