"""Modules whose own forward runs on the local part of its parameters, which stay DTensors for all others.

A module's class is replaced by a subclass of it whose attributes of the parameters' names give what forward is to see
(torch.nn.utils.parametrize does the same). So a layer's forward, hooks on it, methods of its parent that use its
parameters and checkpoints of activations all work unchanged, and cost no dispatch of DTensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from functools import cache
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from echelon.parallel.tensor.comm import add, chunk_of, enter
from echelon.torch_compat import assert_async, registered_tensors


class Sight(Enum):
    """What a module's forward sees of one of its parameters or buffers."""

    LOCAL = "its local part"
    SUMMED = "its local part, the gradient added over the ranks"
    HIDDEN = "None: it is added after the ranks' results are"
    ZERO = "zeros, for a forward that must have one"


def localise(module: nn.Module, sights: Mapping[str, Sight]) -> None:
    """Let the module's forward see its DTensors so, in place."""
    if sights:
        kind: Any = type(module)
        module.__class__ = _subclass(kind, tuple(sorted(sights.items(), key=lambda item: item[0])))


def local_part(tensor: Tensor, summed: bool = False) -> Tensor:
    """Return a DTensor's local part, any shape, differentiable; `summed`: the gradient is added over the ranks."""
    if not isinstance(tensor, DTensor):
        return tensor
    local = tensor.to_local()
    return enter(local, tensor.device_mesh.get_group()) if summed and local.requires_grad else local


def embed_by_rows(module: nn.Embedding, embed_from: int) -> None:
    """Let an Embedding that holds rows from `embed_from` on look up its own and add those of the other ranks."""
    kind: Any = type(module)
    module.__class__ = _embedding(kind)
    module._first_row = embed_from  # type: ignore[assignment]


@cache
def _subclass(kind: Any, sights: tuple[tuple[str, Sight], ...]) -> Any:
    attributes = {name: _attribute(name, sight) for name, sight in sights}
    return type(f"Local{kind.__name__}", (kind,), {**attributes, "__module__": kind.__module__})


def _attribute(name: str, sight: Sight) -> property:
    def see(module: nn.Module) -> Tensor | None:
        """Return the tensor as the layer's computation sees it."""
        held = registered_tensors(module)[name]
        if isinstance(held, DTensor) and held.device_mesh.ndim > 1:
            return held  # sharded as well, and not gathered: fully_shard looks for its own parameter
        if held is None or sight is Sight.HIDDEN:
            return None
        local = local_part(held, summed=sight is Sight.SUMMED)
        return local.new_zeros(local.shape) if sight is Sight.ZERO else local

    return property(see)


@cache
def _embedding(kind: Any) -> Any:
    def forward(self: Any, ids: Tensor) -> Tensor:
        """Look up ids (N, T) in this rank's rows; the ranks' results (N, T, D) are added.

        Raises:
            RuntimeError: the table has no such row; on a GPU, a later call raises it.
        """
        weight, table = self.weight, registered_tensors(self)["weight"]
        assert isinstance(table, DTensor)
        inside = ((ids >= 0) & (ids < len(table))).all()
        assert_async(inside, f"ids are not all among the {len(table)} rows of the embedding")  # a GPU is not waited for
        mine = ids - self._first_row
        absent = (mine < 0) | (mine >= len(weight))
        padding = None if self.padding_idx is None else self.padding_idx - self._first_row
        if padding is not None and not 0 <= padding < len(weight):
            padding = None
        rows = F.embedding(mine.masked_fill(absent, 0), weight, padding)
        return add(rows.masked_fill(absent.unsqueeze(-1), 0), table.device_mesh.get_group())

    return type(f"Split{kind.__name__}", (kind,), {"forward": forward, "__module__": kind.__module__})


def first_row(rows: int, mesh_size: int, rank: int) -> int:
    """Return the first row of a table that this rank holds."""
    return chunk_of(rows, mesh_size, rank)[0]
