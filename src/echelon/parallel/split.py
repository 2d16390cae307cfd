"""A model put where its layout says: split by pipeline, tensor and sharding, in this order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import nn

from echelon.core.axes import Axis
from echelon.core.hints import Hints
from echelon.parallel.base import Placement
from echelon.parallel.blocks import find_blocks
from echelon.parallel.fsdp import reshard, shard
from echelon.parallel.pieces import Pieces
from echelon.parallel.recompute import Recompute, recompute_blocks


@dataclass(frozen=True)
class SplitOptions:
    """How a model is split beyond its layout.

    Attributes:
        tensor_plan: patterns to styles of tensor parallelism, over the model's own hints.
        cuts: names of the blocks that pipeline stages begin with; empty: balanced.
        recompute: what backward computes again.
    """

    tensor_plan: Mapping[str, str] = field(default_factory=dict)
    cuts: tuple[str, ...] = ()
    recompute: Recompute = "none"


@dataclass(frozen=True)
class SplitModel:
    """What this rank has of a model.

    Attributes:
        module: what forward goes through.
        pieces: the local tensors, for everything that is not forward and backward.
    """

    module: nn.Module
    pieces: Pieces

    def settle(self) -> None:
        """Let go of what a forward pass without backward leaves behind."""
        reshard(self.module)


def split_model(model: nn.Module, placement: Placement, hints: Hints | None, options: SplitOptions) -> SplitModel:
    """Split a model, the same on every rank, in place.

    Raises:
        UserError: the model cannot be split so.
    """
    blocks = find_blocks(model, hints)
    recompute_blocks(model, blocks, options.recompute)
    mesh = placement.axis(Axis.FSDP)
    if mesh is not None:
        shard(model, blocks, mesh)
    return SplitModel(model, Pieces([model], placement))
