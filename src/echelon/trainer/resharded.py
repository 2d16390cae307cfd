"""What ranks of another world size leave to those of now."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def mean_of(states: Sequence[Any]) -> Any:
    """Return the mean of states of one form, such as each former rank's optimizer: of tensors of floats element by
    element, of all else the first one's.

    Replicas that had moments of their own (local SGD, DiLoCo, EASGD) go on from their mean, as from the mean of their
    parameters. Where not all have an entry (one had not stepped yet), the first one's stands.

    >>> mean_of([{"state": {0: {"exp_avg": torch.tensor([1.0])}}}, {"state": {0: {"exp_avg": torch.tensor([3.0])}}}])
    {'state': {0: {'exp_avg': tensor([2.])}}}
    """
    first = states[0]
    if isinstance(first, dict) and all(isinstance(s, dict) and s.keys() == first.keys() for s in states):
        return {key: mean_of([state[key] for state in states]) for key in first}
    if isinstance(first, Tensor) and first.is_floating_point() and all(_alike(first, s) for s in states):
        return torch.stack([s.to(first.device, torch.float64) for s in states]).mean(0).to(first.dtype)
    return first


def _alike(first: Tensor, other: Any) -> bool:
    return isinstance(other, Tensor) and other.shape == first.shape and other.dtype == first.dtype
