"""A model put where its layout says: cut into a pipeline's stages, its layers split, its parameters sharded."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.core.axes import Axis
from echelon.core.errors import UserError
from echelon.core.hints import Hints, Style
from echelon.parallel.base import Placement
from echelon.parallel.blocks import Recompute, find_blocks, read_outside, recompute_blocks, reshard, shard
from echelon.parallel.deferred_init import DeferredInit
from echelon.parallel.local_shards import LocalShards
from echelon.parallel.precision import cast_blocks, cast_parameters
from echelon.parallel.sync_batchnorm import convert_sync_batchnorm
from echelon.tasks import nest
from echelon.tasks.nest import Nest

if TYPE_CHECKING:
    from echelon.parallel.pipeline import Pipeline
    from echelon.parallel.tensor import TensorPlan
    from echelon.parallel.tensor.check import Answer


@dataclass(frozen=True)
class SplitOptions:
    """How a model is split beyond its layout, and what a pipeline has to know of the training.

    Attributes:
        example: inputs of at least one sample, random, the same on every rank: on it a plan that nobody declared is
            tried, and a pipeline's blocks are measured.
        loss: sums over units of the outputs and targets of samples.
        score: of a task in training, summed over samples.
        tensor_plan: patterns to styles of tensor parallelism, over the model's own hints.
        cuts: names of the blocks that pipeline stages begin with; empty: balanced.
        recompute: what backward computes again.
        samples: that this rank has of a whole batch at a time; 0: not known.
        autocast: type that autocast gives to matrix products in a pipeline; None: no autocast.
        statistics: ranks over whose samples BatchNorm takes its statistics; None: each rank its own.
        still: names of the modules whose statistics stay as they are.
        deferred: the model is on the meta device, and this is how its values are made.
        parameters: type of the copies of the parameters that a forward pass in training uses; None: the parameters.
    """

    example: Nest
    loss: Callable[[Any, Any], Tensor]
    score: Callable[[Any, Any], Tensor | None] | None = None
    tensor_plan: Mapping[str, Style] = field(default_factory=dict)
    cuts: tuple[str, ...] = ()
    recompute: Recompute = "none"
    samples: int = 0
    autocast: torch.dtype | None = None
    deferred: DeferredInit | None = None
    statistics: dist.ProcessGroup | None = None
    still: Set[str] = frozenset()
    parameters: torch.dtype | None = None


@dataclass(frozen=True)
class SplitModel:
    """What this rank has of a model.

    Attributes:
        module: what forward goes through.
        pieces: the local tensors, for everything that is not forward and backward.
        pipeline: the module, where it is one: it runs forward and backward of a batch by itself.
        notes: what a user has to know, in sentences.
    """

    module: nn.Module
    pieces: LocalShards
    pipeline: Pipeline | None = None
    notes: tuple[str, ...] = ()

    def settle(self) -> None:
        """Let go of what a forward pass without backward leaves behind."""
        reshard(self.module)


def split_model(model: nn.Module, placement: Placement, hints: Hints | None, options: SplitOptions) -> SplitModel:
    """Split a model, the same on every rank, in place.

    Raises:
        UserError: the model cannot be split so.
    """
    blocks = list(find_blocks(model, hints))
    plan = _plan_layers(model, placement, hints, options)
    tried = plan is not None and (plan.found or bool(options.tensor_plan))
    before = _answer(model, options) if tried else None
    separate = blocks
    if placement.axis(Axis.FSDP) is not None and options.deferred is None:  # models made late declare their blocks
        known = _present(model, blocks)
        outside = read_outside(model, known, lambda: nest.call(model, options.example)) if known else set()
        separate = [name for name in blocks if name not in outside]
    pipeline = _cut(model, placement, hints, options, plan.styles if plan is not None else {})
    modules = pipeline.stage_modules if pipeline is not None else [model]
    if options.statistics is not None:  # not before, for one rank alone measures the pipeline's blocks
        modules = [convert_sync_batchnorm(module, options.statistics, still=options.still) for module in modules]
    along_tp, along_fsdp = placement.axis(Axis.TP), placement.axis(Axis.FSDP)
    param_dtype = options.parameters if along_fsdp is None else None  # sharding makes its own copies
    _recompute(modules, blocks, options.recompute, param_dtype)
    for module in modules:
        if plan is not None and along_tp is not None:
            from echelon.parallel.tensor import apply_plan

            apply_plan(module, along_tp, plan)
    split = pipeline if pipeline is not None else model
    notes = pipeline.notes if pipeline is not None else ()
    if before is not None:
        from echelon.parallel.tensor import same_function

        notes += same_function(split, options.example, before)
    reached = []
    if along_fsdp is not None:
        reached = [shard(module, _present(module, separate), along_fsdp, options.parameters) for module in modules]
    if pipeline is None and param_dtype is not None:
        cast_parameters(model, param_dtype)
    if options.deferred is not None:
        options.deferred.give_memory(modules)
    pieces = LocalShards(modules, placement, reached)
    if options.deferred is not None:
        options.deferred.fill(pieces.fill)
    return SplitModel(split, pieces, pipeline, notes)


def recompute_model(model: nn.Module, hints: Hints | None, how: Recompute, param_dtype: torch.dtype | None) -> None:
    """Make backward compute a whole model's blocks again, in place.

    Args:
        narrow: type of the parameters' copies that the forward pass uses.

    Raises:
        UserError: nothing in the model repeats.
    """
    _recompute([model], list(find_blocks(model, hints)), how, param_dtype)


def _plan_layers(
    model: nn.Module, placement: Placement, hints: Hints | None, options: SplitOptions
) -> TensorPlan | None:
    layout = placement.layout
    if layout.tp == 1:
        return None
    from echelon.parallel.tensor import plan_tensor

    return plan_tensor(model, layout.tp, hints, options.tensor_plan, layout.sequence)


def _answer(model: nn.Module, options: SplitOptions) -> Answer:
    from echelon.parallel.tensor import answer

    return answer(model, options.example)


def _cut(
    model: nn.Module, placement: Placement, hints: Hints | None, options: SplitOptions, styles: Mapping[str, Style]
) -> Pipeline | None:
    mesh, layout = placement.axis(Axis.PP), placement.layout
    if mesh is None:
        return None
    from echelon.parallel.pipeline import Judge, Pipeline, PipelineSettings

    settings = PipelineSettings(
        schedule=layout.schedule,
        microbatches=layout.microbatches,
        cuts=options.cuts,
        samples=options.samples,
        autocast=options.autocast,
        parameters=options.parameters,
        sharded=layout.fsdp > 1,
        data_group=placement.group(Axis.FSDP),
        styles=styles,
    )
    return Pipeline(model, hints, mesh, settings, Judge(options.loss, options.score), options.example)


def _recompute(modules: list[nn.Module], blocks: list[str], how: Recompute, param_dtype: torch.dtype | None) -> None:
    if how != "none" and not blocks:
        kind = type(modules[0]).__name__
        raise UserError(
            f"--recompute {how}: no repeated blocks were found in {kind}: leave it out, or put the model's layers "
            "into a ModuleList or Sequential of blocks"
        )
    for module in modules:
        if how != "none" and param_dtype is not None:
            cast_blocks(_present(module, blocks), param_dtype)
        recompute_blocks(_present(module, blocks), how)


def _present(module: nn.Module, names: list[str]) -> dict[str, nn.Module]:
    """Return those of the blocks that a stage has."""
    known = dict(module.named_modules())
    return {name: known[name] for name in names if name in known}
