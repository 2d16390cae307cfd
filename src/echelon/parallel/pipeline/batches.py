"""A batch as micro-batches of one size."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.tasks import nest
from echelon.tasks.nest import Nest
from echelon.torch_compat import BatchNormBase, backward_in_evaluation


@dataclass(frozen=True)
class MicroBatches:
    """Inputs of one size, and the targets of those of them that count: fewer in the last ones, perhaps none."""

    inputs: tuple[Nest, ...]
    targets: tuple[Nest, ...]


def cut_batch(inputs: Nest, targets: Nest, count: int) -> MicroBatches:
    """Cut inputs (N, ...) and targets (N or fewer, ...) into `count` micro-batches of ceil(N / count).

    What is missing is filled up with copies of the last sample without targets.
    """
    samples = nest.rows(inputs)
    size = -(-samples // count)
    missing = size * count - samples

    def filled(leaf: Tensor) -> Tensor:
        """Return a leaf (N, ...) as (N + missing, ...)."""
        return torch.cat([leaf, leaf[-1:].expand(missing, *leaf.shape[1:])])

    if missing:
        inputs = nest.map_leaves(filled, inputs)
    parts = [slice(i * size, (i + 1) * size) for i in range(count)]
    return MicroBatches(
        tuple(nest.take(inputs, part) for part in parts), tuple(nest.take(targets, part) for part in parts)
    )


def has_batchnorm(modules: Sequence[nn.Module]) -> bool:
    """Whether a sample's output depends on the other samples of its micro-batch."""
    return any(isinstance(m, BatchNormBase) for module in modules for m in module.modules())


def dividing_count(samples: int, most: int, group: dist.ProcessGroup | None, device: torch.device) -> int:
    """Return the greatest number of equal micro-batches up to `most`, the same on all ranks of a group."""
    if group is not None:
        extremes = torch.tensor([samples, -samples], device=device)
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=group)
        largest, smallest = int(extremes[0]), -int(extremes[1])
        if largest != smallest:  # by one: nothing divides both
            return 1
    return next(count for count in range(min(most, max(1, samples)), 0, -1) if samples % count == 0)


@contextmanager
def evaluating(modules: Sequence[nn.Module], blank: bool) -> Iterator[None]:
    """For a blank batch, put modules into evaluation mode: it must not enter their statistics. Backward may follow."""
    modes = [(m, m.training) for module in modules for m in module.modules()] if blank else []
    for part, _ in modes:
        part.training = False
    try:
        with backward_in_evaluation(modules if blank else ()):
            yield
    finally:
        for part, mode in modes:
            part.training = mode
