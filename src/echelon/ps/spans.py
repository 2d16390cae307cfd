"""A model's parameters against the table of keys: how they are cut, and which elements of which are the same."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import nn

from echelon.core.errors import UserError
from echelon.core.shards import overlaps
from echelon.models.tables import sparse_tables
from echelon.optim.own import NO_RATES
from echelon.ps.table import Cut, KeyRange, KeyTable, ParameterInfo, cut_table

_NAMES = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def model_table(model: nn.Module, cut: Cut, rates: Mapping[str, float] = NO_RATES) -> KeyTable:
    """Cut a model's trainable parameters into keys; biases and normalisation have no weight decay.

    Tables with sparse gradients (`sparse=True`) are cut by rows, which travel alone.

    Args:
        rates: factors of the learning rate by name of parameter; 1 for those left out.

    Raises:
        UserError: parameters of several element types, or none.
    """
    listed = set(getattr(model, "no_weight_decay", tuple)())
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    tables = sparse_tables(model)
    infos = [
        ParameterInfo(
            name,
            tuple(p.shape),
            not (p.ndim <= 1 or name.endswith(".bias") or name in listed),
            rates.get(name, 1.0),
            name in tables,
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


def spans_of(parameters: list[nn.Parameter], table: KeyTable) -> list[KeySpan]:
    """Match the parameters, behind each other, with the keys' ranges."""
    bounds = [0, *accumulate(parameter.numel() for parameter in parameters)]
    starts = [key.start for key in table.keys]
    return [
        KeySpan(key, index, both.in_second, both.in_first)
        for index, span in enumerate(pairwise(bounds))
        for key in table.keys[bisect_right(starts, span[0]) - 1 : bisect_left(starts, span[1])]
        for both in overlaps([span], [(key.start, key.stop)])
    ]
