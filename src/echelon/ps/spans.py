"""A model's parameters against the table of keys: how they are cut, and which elements of which are the same."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from itertools import accumulate, pairwise

import torch
from torch import nn

from echelon.core.errors import UserError
from echelon.core.shards import overlaps
from echelon.models.tables import sparse_tables
from echelon.optim.own import NO_RATES
from echelon.ps.table import Cut, KeyRange, KeyTable, ParameterInfo, RowStart, cut_table

_NAMES = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16", torch.float16: "float16"}


NO_STARTS: Mapping[str, RowStart] = {}


def model_table(
    model: nn.Module, cut: Cut, rates: Mapping[str, float] = NO_RATES, starts: Mapping[str, RowStart] = NO_STARTS
) -> KeyTable:
    """Cut a model's trainable parameters into keys; biases and normalisation have no weight decay.

    Tables with sparse gradients (`sparse=True`) are cut by rows, which travel alone.

    Args:
        rates: factors of the learning rate by name of parameter; 1 for those left out.
        starts: how rows of tables begin that servers make when they are first asked for, by name.

    Raises:
        UserError: parameters of several element types, or none.
    """
    listed = set(getattr(model, "no_weight_decay", tuple)())
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    tables, shapes = sparse_tables(model), whole_shapes(model)
    infos = [
        ParameterInfo(
            name,
            shapes.get(name, tuple(p.shape)),
            not (p.ndim <= 1 or name.endswith(".bias") or any(fnmatch(name, each) for each in listed)),
            rates.get(name, 1.0),
            name in tables,
            starts.get(name),
        )
        for name, p in named
    ]
    types = {p.dtype for _, p in named}
    if len(types) != 1 or not types <= _NAMES.keys():
        raise UserError(f"--sync ps: the parameters have the types {types or 'none'}: one floating type is needed")
    return cut_table(infos, Cut(cut.servers, cut.chunk_bytes, cut.whole_tensors, _NAMES[types.pop()]))


@dataclass
class KeySpan:
    """Which elements of a parameter are which elements of a key."""

    key: KeyRange
    parameter: int
    in_key: slice
    in_parameter: slice


def whole_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Return the shapes of tables with sparse gradients, by name, also where a weight has no rows here."""
    modules = dict(model.named_modules())
    return {
        name: (int(modules[name.rpartition(".")[0]].num_embeddings), weight.shape[1])
        for name, weight in sparse_tables(model).items()
    }


def spans_of(sizes: Sequence[int], table: KeyTable) -> list[KeySpan]:
    """Match parameters of so many elements, behind each other, with the keys' ranges."""
    bounds = [0, *accumulate(sizes)]
    starts = [key.start for key in table.keys]
    return [
        KeySpan(key, index, both.in_second, both.in_first)
        for index, span in enumerate(pairwise(bounds))
        for key in table.keys[bisect_right(starts, span[0]) - 1 : bisect_left(starts, span[1])]
        for both in overlaps([span], [(key.start, key.stop)])
    ]
