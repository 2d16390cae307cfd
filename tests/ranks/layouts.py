"""Training a small model in any layout, without a launcher: the parts are built as a run builds them, in float64."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from echelon.config import RunConfig, build
from echelon.config.validate import check_world
from echelon.core.shards import Region
from echelon.core.shares import share_sizes
from echelon.core.task import Metric
from echelon.data.base import Batch, DataInfo, Shard
from echelon.data.order import local_part
from echelon.models import ModelInput
from echelon.models.builtin import mlp, resnet20, small_vit
from echelon.models.builtin.small_gpt import SmallGPT, TextSize
from echelon.models.builtin.small_vit import Size
from echelon.observe.phases import HostClock
from echelon.parallel.base import alone, place
from echelon.run.resolve import resolve
from echelon.tasks.base import Metrics, Task
from echelon.trainer.parts import build_parts
from echelon.trainer.state import RunParts, seed_everything
from echelon.trainer.step import Step, StepSettings
from echelon.trainer.work import Work
from echelon.trainer.world import World
from tests.ranks.spawn import Rank

INPUT = ModelInput(4, 1, 8)
INFO = DataInfo("blobs", ("a", "b", "c", "d"), 1, 8, 64, 16, (16, 16, 16, 16))
TEXT = TextSize(vocabulary=16, context=6)
TABLE_ROWS, LOOKED_UP = 30, 5
SIZES = (8, 8, 7, 3)
"""Samples of the global batches, over and over: uneven parts, and a tail that leaves ranks without any."""


def _vit() -> nn.Module:
    return small_vit.SmallViT(INPUT, Size(depth=2, width=16, heads=4, hidden=32))


def _gpt() -> nn.Module:
    return SmallGPT(TEXT, Size(depth=2, width=16, heads=4, hidden=32))


def _untied_gpt() -> nn.Module:
    return SmallGPT(TextSize(16, 6, tied=False), Size(depth=2, width=16, heads=4, hidden=32))


class Tables(nn.Module):
    """Ids (N, LOOKED_UP) -> (N, 4): two lookups in a table, one with padding; bags of another one; and a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.users = nn.Embedding(TABLE_ROWS, 6, padding_idx=2, sparse=True)
        self.items = nn.EmbeddingBag(TABLE_ROWS + 8, 6, sparse=True, padding_idx=4)
        self.kinds = nn.Embedding(3, 6, sparse=True)  # fewer rows than some worlds have ranks
        self.layer = nn.Linear(6, 4)

    def forward(self, ids: Tensor) -> Tensor:
        users = self.users(ids[:, 0]) + self.users(ids[:, 1:3]).sum(1)
        out: Tensor = self.layer(users * self.items(ids) + self.kinds(ids[:, 0] % 3))
        return out


MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "vit": _vit,
    "gpt": _gpt,
    "untied_gpt": _untied_gpt,
    "resnet": lambda: resnet20.build(INPUT),
    "mlp": lambda: mlp.build(INPUT),
    "tables": Tables,
}


@dataclass(frozen=True)
class Trial:
    """What is trained: a model of MODELS, a layout, and any settings by dotted name.

    `deals`: weights of the ranks' parts of a batch, of one step after the other, over and over; none: equal parts.
    """

    model: str
    parallel: str = "dp=-1"
    settings: Mapping[str, Any] = field(default_factory=dict)
    sizes: Sequence[int] = SIZES
    deals: Sequence[tuple[int, ...]] = ()

    def config(self) -> RunConfig:
        """Return the run's description."""
        common = {"optimizer.name": "momentum", "optimizer.lr": 0.05, "strategy.parallel": self.parallel}
        common |= {"data.batch_size": max(self.sizes), "model.name": self.model}
        return build(None, {**common, **self.settings}).config

    def global_batch(self, step: int) -> tuple[Tensor, Tensor]:
        """Return the inputs and targets of a step, over all ranks."""
        generator = torch.Generator().manual_seed(step)
        size = self.sizes[step % len(self.sizes)]
        if self.model.endswith("gpt"):
            tokens = torch.randint(0, TEXT.vocabulary, (size, TEXT.context), generator=generator)
            return tokens, tokens.roll(-1, 1)
        if self.model == "tables":
            ids = torch.randint(0, TABLE_ROWS, (size, LOOKED_UP), generator=generator)
            return ids, torch.randint(0, 4, (size,), generator=generator)
        images = torch.randn(size, 1, 8, 8, generator=generator, dtype=torch.float64)
        return images, torch.randint(0, 4, (size,), generator=generator)


def loss_sum(logits: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy summed over samples, and over tokens where there are any."""
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")


class SumTask(Task):
    """What is trained here: `loss_sum`; never evaluated."""

    name, primary, outputs = "sums", Metric("loss", "min"), 4

    def loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return loss_sum(outputs, targets)

    def wrong_outputs(self, outputs: Tensor, samples: int) -> str:
        return ""  # of any shape: models of images and of sequences learn it

    def metrics(self, device: torch.device) -> Metrics:
        raise NotImplementedError


TASK = SumTask()


@dataclass
class Trainer:
    """One rank's parts of a trial."""

    trial: Trial
    world: World
    parts: RunParts
    step: Step
    losses: list[float] = field(default_factory=list)

    def run(self, first: int, last: int) -> None:
        """Take the steps from `first` to `last`, exclusive, and note the loss of the global batch of each."""
        for step in range(first, last):
            inputs, targets = self.trial.global_batch(step)
            deals = self.trial.deals
            shard = Shard(self.world.data_rank, self.world.data_size, deals[step % len(deals)] if deals else ())
            own = torch.from_numpy(local_part(np.arange(len(inputs)), shard))
            sizes = share_sizes(len(inputs), shard.world_size, shard.weights)
            batch = Batch(inputs[own], targets[own], len(inputs), step, sizes=tuple(sizes))
            result = self.step.forward_backward(batch, self.parts.sync)
            loss = result.loss.double() * self.world.counts
            if self.world.group is not None:
                dist.all_reduce(loss)
            self.parts.sync.step()
            if self.parts.ema:
                self.parts.ema.update(self.parts.local_model)
            self.losses.append(float(loss))


def train_on_one_batch(
    parts: RunParts, world: World, clock: HostClock, batch: tuple[Tensor, Tensor], steps: int
) -> list[float]:
    """Train some steps on this rank's samples of one batch; returns the losses, those of all ranks added up."""
    inputs, targets = batch
    step = Step(TASK, StepSettings(world.device, None, 1, 0.0, False), clock, parts.scaler, parts.split)
    own = torch.from_numpy(local_part(np.arange(len(inputs)), Shard(world.data_rank, world.data_size)))
    losses = []
    for number in range(steps):
        result = step.forward_backward(Batch(inputs[own], targets[own], len(inputs), number), parts.sync)
        loss = result.loss.double() * world.counts
        if world.group is not None:
            dist.all_reduce(loss)
        losses.append(float(loss))
        parts.sync.step()
    parts.sync.close()
    return losses


def make_world(config: RunConfig, rank: Rank | None) -> World:
    """Return where a rank stands in the described layout; with None, one process alone."""
    if rank is None or rank.world_size == 1:
        return World(0, 1, 0, torch.device("cpu"), None, alone())
    placement = place(check_world(config, rank.world_size), rank.index, "cpu", rank.timeout)
    return World(rank.index, rank.world_size, rank.index, torch.device("cpu"), dist.group.WORLD, placement)


def make_trainer(trial: Trial, rank: Rank | None, epoch: int = 0) -> Trainer:
    """Build the parts for this rank; with None, for one process alone.

    Args:
        epoch: counted from 0, of which what is trained is.
    """
    config = trial.config()
    world = make_world(config, rank)
    seed_everything(0)
    clock = HostClock()
    example = trial.global_batch(0)[0][:2]
    run = resolve(config)
    work = Work(INFO, TASK, MODELS[trial.model]().double(), example, run.tuning.at(epoch))
    parts = build_parts(run, work, world, clock)
    settings = StepSettings(
        device=world.device,
        autocast=None,
        accumulate=config.training.accumulate,
        clip_norm=config.optimizer.clip_norm,
        channels_last=False,
    )
    return Trainer(trial, world, parts, Step(TASK, settings, clock, parts.scaler, parts.split))


@dataclass(frozen=True)
class HeldTensor:
    """What a rank holds of a parameter or buffer: its values and where they lie (see `Region`)."""

    values: np.ndarray
    region: Region


def held(parts: RunParts) -> dict[str, HeldTensor]:
    """Return what this rank holds, for another process to put together."""
    regions = parts.split.pieces.regions if parts.split else {}
    found = {}
    for name, tensor in parts.local_model.state_dict().items():
        found[name] = HeldTensor(tensor.detach().clone().numpy(), regions.get(name) or Region.whole(tensor.shape))
    return found


def assemble(ranks: Sequence[Mapping[str, HeldTensor]]) -> dict[str, np.ndarray]:
    """Put the whole tensors together from what all ranks hold; copies must be the same bits."""
    whole: dict[str, np.ndarray] = {}
    filled: dict[str, np.ndarray] = {}
    for rank in ranks:
        for name, piece in rank.items():
            target = whole.setdefault(name, np.zeros(piece.region.shape, piece.values.dtype))
            done = filled.setdefault(name, np.zeros(piece.region.shape, bool))
            where = np.ix_(*[np.concatenate([np.arange(*run) for run in runs]) for runs in piece.region.spans])
            same = target[where] == piece.values
            assert np.all(same | ~done[where]), f"{name}: ranks that hold the same piece differ"
            target[where] = piece.values
            done[where] = True
    for name, done in filled.items():
        assert done.all(), f"{name}: elements that nobody holds"
    return whole
