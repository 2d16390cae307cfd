"""Where a rank or a micro-batch has no samples: models that cannot take zeros in their place train all the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

from echelon.data import EvalLoader, LoaderConfig, TrainLoader, from_datasets
from echelon.data.base import Batch, Shard
from echelon.data.own import example_samples
from echelon.observe.phases import HostClock
from echelon.run.resolve import resolve
from echelon.tasks import nest
from echelon.trainer.evaluate import batches_of_all
from echelon.trainer.parts import build_parts
from echelon.trainer.state import seed_everything
from echelon.trainer.step import Step, StepSettings
from echelon.trainer.work import Work
from tests.ranks.layouts import TASK, Trial, assemble, held, make_trainer, make_world
from tests.ranks.spawn import Rank, run_ranks

SAMPLES, BATCH, EPOCHS = 17, 8, 2
PLAIN = {"optimizer.name": "momentum", "optimizer.momentum": 0.0, "optimizer.lr": 0.02, "data.loaders": 0}
SAME = [  # layout, strategy, codec, micro-batches: these compute what one process does
    ("dp=-1", "allreduce", "none", 1),
    ("dp=-1", "allreduce", "none", 3),
    ("fsdp=-1", "allreduce", "none", 1),
    ("dp=-1,zero1", "allreduce", "none", 1),
]
OTHERS = [
    ("dp=-1", "allreduce", "int8", 1),
    ("dp=-1", "local(2)", "none", 1),
    ("dp=-1", "local(2, overlap=1)", "sign", 2),
]


class Sequences(Dataset[dict[str, Tensor]]):
    """Sequences of different lengths with masks, of four classes."""

    def __init__(self, count: int) -> None:
        self.lengths = [2 + i % 4 for i in range(count)]

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        values = torch.randn(self.lengths[i], 3, generator=torch.Generator().manual_seed(i), dtype=torch.float64)
        mask = torch.ones(self.lengths[i], dtype=torch.float64)
        return {"values": values, "mask": mask, "label": torch.tensor(i % 4)}


class Masked(nn.Module):
    """A mean over what the mask leaves, and attention to it: of zeros alone both are NaN, and packing would raise."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.score, self.head = nn.Linear(3, 8), nn.Linear(8, 1), nn.Linear(8, 4)

    def forward(self, values: Tensor, mask: Tensor) -> Tensor:
        if not mask.any(1).all():
            raise ValueError("Length of all samples has to be greater than 0")
        hidden = self.layer(values)
        shares = self.score(hidden).squeeze(-1).masked_fill(mask == 0, -torch.inf).softmax(-1)
        mean = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        out: Tensor = self.head(mean + (shares[..., None] * hidden).sum(1))
        return out


Way = tuple[str, str, str, int]


def learn(rank: Rank | None, ways: Sequence[Way]) -> list[Any]:
    """Train in each way; returns losses and what this rank holds at the end."""
    return [_learn(rank, *way) for way in ways]


def _learn(rank: Rank | None, parallel: str, sync: str, codec: str, accumulate: int) -> tuple[list[float], Any]:
    settings = {**PLAIN, "strategy.sync": sync, "strategy.compression": codec, "training.accumulate": accumulate}
    config = Trial("masked", parallel, settings, (BATCH,)).config()
    world = make_world(config, rank)
    source = from_datasets(Sequences(SAMPLES), Sequences(1))
    loading = LoaderConfig.of(config.data, 0, world.device)
    shard = Shard(world.data_rank, world.data_size)
    seed_everything(0)
    clock = HostClock()
    work = Work(source.info, TASK, Masked().double(), example_samples(source)[0])
    parts = build_parts(resolve(config), work, world, clock)
    step = Step(TASK, StepSettings(world.device, None, accumulate, 0.0, False), clock, parts.scaler, parts.split)
    train, losses = TrainLoader(source, loading, shard), []
    for epoch in range(EPOCHS):
        for batch in train.epoch(epoch):
            loss = step.forward_backward(batch, parts.sync).loss.double() * world.counts
            if world.group is not None:
                dist.all_reduce(loss)
            parts.sync.step()
            losses.append(float(loss))
    with parts.sync.agreed(), torch.no_grad():
        for inputs, _ in batches_of_all(EvalLoader(source, loading, shard), world):
            assert nest.call(parts.model, inputs).isfinite().all()
    parts.sync.close()
    return losses, held(parts)


@pytest.mark.parametrize("ranks", [2, 3])
def test_the_last_batch_may_have_fewer_samples_than_there_are_workers(ranks: int) -> None:
    ((expected, whole),) = learn(None, [("dp=1", "allreduce", "none", 1)])
    parameters = assemble([whole])
    found = run_ranks(learn, ranks, [*SAME, *OTHERS])
    for i, way in enumerate(SAME):
        assert np.allclose(found[0][i][0], expected, rtol=0, atol=1e-9), way
        pieces = assemble([rank[i][1] for rank in found])
        assert all(np.abs(pieces[n] - parameters[n]).max() < 1e-9 for n in parameters), way
    for i, way in enumerate(OTHERS, len(SAME)):
        assert np.isfinite(found[0][i][0]).all(), way
        assert all(np.isfinite(piece.values).all() for rank in found for piece in rank[i][1].values()), way


def test_one_process_may_have_more_micro_batches_than_samples() -> None:
    once, often = learn(None, [("dp=1", "allreduce", "none", 1), ("dp=1", "allreduce", "none", 4)])
    assert np.allclose(once[0], often[0], rtol=0, atol=1e-9)


def without_targets(rank: Rank, layouts: Sequence[str]) -> list[bool]:
    """Take a step, and one of NaN that count nothing, in each layout; returns whether all parameters stay finite."""
    finite = []
    for layout in layouts:
        trainer = make_trainer(Trial("vit", layout), rank)
        trainer.run(0, 1)
        inputs, targets = torch.full((1, 1, 8, 8), torch.nan, dtype=torch.float64), torch.zeros(0, dtype=torch.int64)
        trainer.step.forward_backward(Batch(inputs, targets, 1, 0), trainer.parts.sync)
        trainer.parts.sync.step()
        finite.append(all(bool(p.isfinite().all()) for p in trainer.parts.local_model.parameters()))
    return finite


@pytest.mark.parametrize(
    ("ranks", "layouts"),
    [
        (2, ["pp=2,microbatches=1", "pp=2,microbatches=2,schedule=zero_bubble"]),
        pytest.param(4, ["fsdp=2,pp=2", "tp=2,pp=2", "dp=2,pp=2"], marks=pytest.mark.slow),
    ],
)
def test_gradients_of_a_part_without_targets_are_zeros_in_a_pipeline(ranks: int, layouts: list[str]) -> None:
    assert all(all(finite) for finite in run_ranks(without_targets, ranks, layouts))
