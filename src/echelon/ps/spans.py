"""A model's parameters against the table of keys: how they are cut, and which elements of which are the same."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from echelon.core.errors import UserError
from echelon.ps.table import Cut, KeyRange, KeyTable, ParameterInfo, cut_table

_NAMES = {torch.float32: "float32", torch.float64: "float64", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def model_table(model: nn.Module, cut: Cut) -> KeyTable:
    """Cut a model's trainable parameters into keys; biases and normalisation have no weight decay.

    Raises:
        UserError: parameters of several element types, or none.
    """
    listed = set(getattr(model, "no_weight_decay", tuple)())
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    infos = [
        ParameterInfo(name, tuple(p.shape), not (p.ndim <= 1 or name.endswith(".bias") or name in listed))
        for name, p in named
    ]
    types = {p.dtype for _, p in named}
    if len(types) != 1 or not types <= _NAMES.keys():
        raise UserError(f"--sync ps: the parameters have the types {types or 'none'}: one floating type is needed")
    return cut_table(infos, Cut(cut.servers, cut.chunk_bytes, cut.whole_tensors, _NAMES[types.pop()]))


@dataclass
class Span:
    """Which elements of a parameter are which elements of a key."""

    key: KeyRange
    parameter: int
    in_key: slice
    in_parameter: slice


def spans_of(parameters: list[nn.Parameter], table: KeyTable) -> list[Span]:
    """Match the parameters, behind each other, with the keys' ranges."""
    spans = []
    keys = iter(table.keys)
    key = next(keys)
    start = 0
    for index, parameter in enumerate(parameters):
        stop = start + parameter.numel()
        at = start
        while at < stop:
            while at >= key.stop:
                key = next(keys)
            end = min(stop, key.stop)
            in_key = slice(at - key.start, end - key.start)
            spans.append(Span(key, index, in_key, slice(at - start, end - start)))
            at = end
        start = stop
    return spans
