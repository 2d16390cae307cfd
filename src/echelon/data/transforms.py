"""A user's own transform of inputs: a callable from Python, or `module:function`."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from echelon.core.errors import UserError
from echelon.core.own import find_own
from echelon.data.images import random_state_kept
from echelon.data.order import Indices, item_seeds
from echelon.tasks import nest
from echelon.tasks.nest import Nest

Transform = Callable[[Any], Any]


@dataclass(frozen=True)
class Transforms:
    """A caller's own callables, in place of names: of training samples, and of evaluation samples."""

    training: Transform | None = None
    evaluation: Transform | None = None


NO_TRANSFORMS = Transforms()


@dataclass(frozen=True)
class InputTransform:
    """Applies a user's callable to one sample's inputs at a time.

    Random numbers that it draws from torch, numpy or `random` are seeded by (seed, epoch, draw): they depend neither on
    ranks nor on loaders.

    Args:
        function: takes a sample's inputs, tensors without the batch's dim, and returns tensors of the same shapes and
            types.
        name: for messages.
    """

    function: Transform
    name: str
    seed: int

    def apply(self, epoch: int, draws: Indices, inputs: Nest) -> None:
        """Transform the rows of arrays `(N, ...)` in place.

        Raises:
            UserError: the callable returns something else than it was given.
        """
        rows = nest.map_leaves(torch.from_numpy, inputs)
        with random_state_kept():
            for row, seed in enumerate(item_seeds(self.seed, epoch, draws, transformed=True)):
                torch.default_generator.manual_seed(seed)
                random.seed(seed)
                np.random.seed(seed % 2**32)
                sample = nest.take(rows, row)
                self._write(self.function(nest.map_leaves(torch.clone, sample)), sample)

    def _write(self, made: Any, sample: Nest) -> None:
        values, wanted = nest.leaves(made), nest.leaves(sample)
        kinds, known = [_kind(value) for value in values], [_kind(value) for value in wanted]
        if kinds != known:
            raise UserError(
                f"{self.name} returned {', '.join(kinds) or 'nothing'} for {', '.join(known)}: it must return inputs "
                "of the same shape and type (images are uint8 here, and normalised after it)"
            )
        for value, place in zip(values, wanted, strict=True):
            place.copy_(value)


def own_transform(flag: str, spec: str, function: Transform | None, seed: int) -> InputTransform | None:
    """Return a user's transform: the callable that was given, or the one that `module:function` names; None: none.

    Raises:
        UserError: there is no such function, or it cannot be called.
    """
    if function is None and not spec:
        return None
    function = find_own(flag, spec) if function is None else function
    if not callable(function):
        raise UserError(f"{flag} {spec} is a {type(function).__name__}: name a function of one sample's inputs")
    return InputTransform(function, f"{flag} {spec}".strip(), seed)


def _kind(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
