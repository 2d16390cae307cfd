"""What a layout needs of memory on each rank, before anything starts: predicted from model, batch and optimizer.

Activations are what autograd keeps of a forward pass of two samples on the CPU, scaled to a rank's samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from echelon.config import RunConfig
from echelon.config.validate import check_world
from echelon.core.layout import Layout
from echelon.data.base import DataInfo
from echelon.models import ModelInput, build_model, hints_for
from echelon.parallel.blocks import find_blocks
from echelon.parallel.pipeline.plan import StagePlan, plan_stages
from echelon.parallel.pipeline.settings import PipelineSettings, microbatch_count
from echelon.parallel.tensor.plan import placements_of, plan_tensor
from echelon.train.layouts import read_cuts, read_tensor_plan
from echelon.train.optim import build_optimizer

_SAMPLES = 2  # of the forward pass that is looked at


@dataclass(frozen=True)
class Memory:
    """Predicted bytes on one rank of each part of a pipeline (all other ranks of a stage have as much).

    Attributes:
        gathered: parameters and gradients of a block that are whole while it computes (fsdp).
        averages: the moving average of the weights.
    """

    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    gathered: int
    averages: int
    activations: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(getattr(self, item.name) for item in fields(self))


@dataclass(frozen=True)
class Forecast:
    """The stages of the pipeline (none without), and the memory of a rank of each."""

    stages: tuple[StagePlan, ...]
    memory: tuple[Memory, ...]


def forecast(config: RunConfig, info: DataInfo, ranks: int) -> Forecast:
    """Predict the memory of each rank.

    Raises:
        UserError: the model cannot be built, or not be split as described.
    """
    layout = check_world(config, ranks)
    model = build_model(config.model, ModelInput(len(info.classes), info.channels, info.image_size))
    example = torch.randn(_SAMPLES, info.channels, info.image_size, info.image_size)
    samples = config.data.batch_size // (layout.dp * layout.fsdp) // config.training.accumulate
    stages = _stages(config, layout, model, example, samples)
    share = _shares(config, layout, model)
    moments = _moments(config)
    activations = _kept_per_sample(model, example) * _samples_at_once(config, layout, max(1, samples), stages)
    known = _Known(share, moments, activations)
    return Forecast(stages, tuple(_memory(config, layout, model, names, known) for names in _owned(stages, layout)))


@dataclass(frozen=True)
class _Known:
    """Of each parameter by id the part that a tensor-parallel rank has, moments per number, bytes of activations."""

    share: Mapping[int, float]
    moments: float
    activations: float


def _memory(config: RunConfig, layout: Layout, model: nn.Module, names: Sequence[str], known: _Known) -> Memory:
    """Predict for the ranks that have what is called `names`."""

    def here(name: str) -> bool:
        return any(not each or name == each or name.startswith(f"{each}.") for each in names)

    parameters = {n: p for n, p in model.named_parameters() if here(n)}
    whole = {n: round(p.nbytes * known.share[id(p)]) for n, p in parameters.items()}
    held = sum(-(-size // layout.fsdp) for size in whole.values())
    buffers = sum(b.nbytes for n, b in model.named_buffers() if here(n))
    gathered = 0
    if layout.fsdp > 1:
        blocks = find_blocks(model, hints_for(model))
        sizes = {block: sum(s for n, s in whole.items() if n.startswith(f"{block}.")) for block in blocks}
        root = sum(whole.values()) - sum(sizes.values())
        gathered = 2 * (root + max(sizes.values(), default=0))
    total = sum(p.nbytes for p in model.parameters())
    return Memory(
        parameters=held,
        gradients=held,
        optimizer=round(held * known.moments / (layout.dp if layout.zero1 else 1)),
        buffers=buffers,
        gathered=gathered,
        averages=held + buffers if config.training.ema else 0,
        activations=round(known.activations * sum(p.nbytes for p in parameters.values()) / total),
    )


def _owned(stages: Sequence[StagePlan], layout: Layout) -> list[list[str]]:
    """Return the names of what each rank of the pipeline has; everything without one."""
    if not stages:
        return [[""]]
    return [[n for s in stages if s.rank == rank for step in s.steps for n in step.owns] for rank in range(layout.pp)]


def _stages(
    config: RunConfig, layout: Layout, model: nn.Module, example: Tensor, samples: int
) -> tuple[StagePlan, ...]:
    if layout.pp == 1:
        return ()
    settings = _pipeline(config, layout, samples)
    stages = plan_stages(model, hints_for(model), settings, layout.pp, example)
    microbatch_count(settings, layout.pp, len(stages))
    return stages


def _pipeline(config: RunConfig, layout: Layout, samples: int) -> PipelineSettings:
    cuts = read_cuts(config.strategy.cuts)
    return PipelineSettings(layout.schedule, layout.microbatches, cuts, samples)


def _shares(config: RunConfig, layout: Layout, model: nn.Module) -> dict[int, float]:
    """Return which part of each parameter a tensor-parallel rank has, by the parameter's id."""
    shares = {id(p): 1.0 for p in model.parameters()}
    if layout.tp > 1:
        own = read_tensor_plan(config.strategy.tensor_plan)
        plan = plan_tensor(model, layout.tp, hints_for(model), own, layout.sequence)
        shares |= {key: 1 / layout.tp for key, how in placements_of(model, plan).items() if not how.is_replicate()}
    return shares


def _moments(config: RunConfig) -> float:
    """Return how many numbers the optimizer keeps per number of a parameter, from one step on a small matrix."""
    probe = nn.Linear(8, 8, bias=False)
    optimizer = build_optimizer(probe, config.optimizer, config.data.batch_size)
    probe(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    kept = optimizer.state[probe.weight].values()
    return sum(value.numel() for value in kept if isinstance(value, Tensor) and value.ndim) / probe.weight.numel()


def _kept_per_sample(model: nn.Module, example: Tensor) -> float:
    """Return the bytes per sample that autograd keeps of a forward pass, parameters apart."""
    own = {p.untyped_storage().data_ptr() for p in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        held.append(tensor)
        return tensor

    held: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = model(example)
    del output
    return sum(kept.values()) / len(example)


def _samples_at_once(config: RunConfig, layout: Layout, samples: int, stages: Sequence[StagePlan]) -> float:
    """Return of how many samples activations are kept at a time: in a pipeline, of the micro-batches under way."""
    if layout.pp == 1:
        return samples
    count = microbatch_count(_pipeline(config, layout, samples), layout.pp, len(stages))
    under_way = count if layout.schedule in ("gpipe", "looped_bfs") else min(count, len(stages))
    return -(-samples // count) * under_way
