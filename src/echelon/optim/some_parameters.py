"""A step of an optimizer for some of its parameters, while others still wait for their gradients."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

BY_PARAMETER = ("sgd", "nesterov", "momentum", "adam", "adamw")
"""Optimizers, all of them torch's, that keep no state beside each parameter's: several steps for some parameters each
are one step for all of them, bit for bit. Many of timm's count their steps by group."""

Settings = Sequence[Mapping[str, object]]
"""Of each group of an optimizer all but its parameters."""


def settings_of(optimizer: torch.optim.Optimizer) -> Settings:
    """Return the present settings of an optimizer's groups, such as their rates."""
    return [{name: value for name, value in g.items() if name != "params"} for g in optimizer.param_groups]


def step_for(optimizer: torch.optim.Optimizer, parameters: Iterable[Tensor], settings: Settings) -> None:
    """Update some parameters (any shape) with the settings of a moment (`settings_of`), and clear their gradients."""
    chosen = {id(parameter): parameter for parameter in parameters}
    with _narrowed(optimizer, chosen, settings):
        optimizer.step()
    for parameter in chosen.values():
        parameter.grad = None


@contextmanager
def _narrowed(optimizer: torch.optim.Optimizer, chosen: Mapping[int, Tensor], settings: Settings) -> Iterator[None]:
    """Let an optimizer have those parameters alone, and other settings, inside the block."""
    groups = optimizer.param_groups
    some = [
        {**group, **values, "params": [p for p in group["params"] if id(p) in chosen]}
        for group, values in zip(groups, settings, strict=True)
    ]
    optimizer.param_groups = [group for group in some if group["params"]]
    try:
        yield
    finally:
        optimizer.param_groups = groups
