"""Buckets: the units that a codec works on, fixed by the model alone.

DDP has buckets of its own, and puts parameters into others after the first step or after a restart. A codec's error
memory, thresholds and draws must not depend on that: so DDP's are copied into these, runs of parameters in the order
in which backward is expected to reach them, and a bucket is reduced when its last parameter has arrived.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from echelon.collectives.wire import is_small
from echelon.core.shards import FlatTensor

FIRST_BUCKET_NUMEL = 1 << 18
"""Elements at which the first bucket is complete: few, so that the network has work early."""
BUCKET_NUMEL = 1 << 20
"""Elements at which any other bucket is complete. What follows in backward is left to the next one: a large parameter
that has arrived never waits for a later one."""


@dataclass(frozen=True)
class Bucket:
    """Parameters that are encoded as one vector.

    Attributes:
        number: the bucket's place in the layout.
        group: `weights` are encoded; `small` ones are sent whole.
    """

    number: int
    group: str
    dtype: torch.dtype
    device: torch.device
    members: tuple[FlatTensor, ...]

    @property
    def numel(self) -> int:
        """Elements of all members."""
        return self.members[-1].span[1]


@dataclass(frozen=True)
class BucketPlace:
    """Where a parameter's gradient goes."""

    bucket: int
    member: FlatTensor


@dataclass(frozen=True)
class BucketLayout:
    """All buckets of a model, and each parameter's place by its name."""

    buckets: tuple[Bucket, ...]
    places: dict[str, BucketPlace]


def lay_out(parameters: Iterable[tuple[str, Tensor]]) -> BucketLayout:
    """Group parameters of any shape, given in the order in which backward reaches them, into buckets.

    A bucket holds parameters of one group, dtype and device.
    """
    buckets: list[Bucket] = []
    open_runs: dict[tuple[str, torch.dtype, torch.device], list[tuple[str, Tensor]]] = {}
    for name, parameter in parameters:
        key = ("small" if is_small(parameter) else "weights", parameter.dtype, parameter.device)
        run = open_runs.setdefault(key, [])
        run.append((name, parameter))
        if sum(p.numel() for _, p in run) >= (BUCKET_NUMEL if buckets else FIRST_BUCKET_NUMEL):
            buckets.append(_close(len(buckets), key[0], open_runs.pop(key)))
    for key, run in open_runs.items():
        buckets.append(_close(len(buckets), key[0], run))
    places = {m.name: BucketPlace(c.number, m) for c in buckets for m in c.members}
    return BucketLayout(tuple(buckets), places)


def _close(number: int, group: str, run: Sequence[tuple[str, Tensor]]) -> Bucket:
    members, start = [], 0
    for name, parameter in run:
        members.append(FlatTensor(name, tuple(parameter.shape), (start, start + parameter.numel())))
        start += parameter.numel()
    return Bucket(number, group, run[0][1].dtype, run[0][1].device, tuple(members))
