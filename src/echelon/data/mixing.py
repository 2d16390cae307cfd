"""Mixup and CutMix over global batches (timm's `Mixup`): the same whatever the number of ranks.

Samples 2j and 2j + 1 of a global batch are mixed with each other, with one lambda and one box for the batch: these are
timm's pairs (i, B - 1 - i) in another order of a shuffled batch, and a rank needs at most one sample of a neighbour's
at either end of its part. Random numbers depend on (seed, epoch, batch) alone.

Papers: mixup, Zhang et al. 2018 (https://arxiv.org/abs/1710.09412); CutMix, Yun et al. 2019
(https://arxiv.org/abs/1905.04899).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from echelon.config import DataConfig
from echelon.core.errors import UserError
from echelon.data.base import Batch, DataInfo, Shard
from echelon.data.images import random_state_kept
from echelon.data.order import local_part, mix_seed
from echelon.tasks.nest import TensorSpec


@dataclass(frozen=True)
class PairSlices:
    """The samples of a global batch that a rank loads, whole pairs, and where its own part lies among them."""

    loaded: slice
    own: slice


def pairs_around(size: int, shard: Shard) -> PairSlices:
    """Return which samples of a batch a rank loads to mix its own.

    >>> pairs_around(10, Shard(1, 2))
    PairSlices(loaded=slice(4, 10, None), own=slice(1, 6, None))
    """
    part = local_part(np.arange(size), shard)
    if not len(part):
        return PairSlices(slice(0, 0), slice(0, 0))
    first, end = int(part[0]), int(part[-1]) + 1
    begin = first - first % 2
    return PairSlices(slice(begin, min(end + end % 2, size)), slice(first - begin, end - begin))


class Mixer:
    """Mixes batches of inputs and class numbers; targets become shares of the classes, `(B, C)`.

    Raises:
        UserError: the data is of another kind.
    """

    def __init__(self, config: DataConfig, info: DataInfo, seed: int) -> None:
        from timm.data.mixup import Mixup

        spec = info.inputs
        if not info.classes or not isinstance(spec, TensorSpec) or "float" not in spec.dtype:
            raise UserError(f"--mixup and --cutmix mix floating-point inputs of one class each; {info.name} has others")
        if config.cutmix and len(spec.shape) != 3:
            raise UserError(f"--cutmix cuts boxes out of images (C, H, W); inputs of {info.name} are {spec.shape}")
        self._seed, self._classes = seed, len(info.classes)
        self._orders: dict[tuple[int, torch.device], Tensor] = {}
        self._mixup: Any = Mixup(config.mixup, config.cutmix, label_smoothing=0.0, num_classes=self._classes)

    def _order(self, paired: int, device: torch.device) -> Tensor:
        """Return the order of pairs on a device, made once: a GPU would be waited for."""
        if (paired, device) not in self._orders:
            self._orders[paired, device] = _pairs_first_and_last(paired).to(device)
        return self._orders[paired, device]

    def mix(self, batch: Batch, epoch: int, wanted: slice) -> Batch:
        """Return a rank's own part of a batch, mixed; the last sample of an odd global batch stays as it is.

        Args:
            batch: what `pairs_around` says is to be loaded.
            wanted: the rank's own part of it.
        """
        inputs, classes = batch.inputs, batch.targets
        assert isinstance(inputs, Tensor) and isinstance(classes, Tensor)
        shares = F.one_hot(classes, self._classes).to(inputs.dtype)
        if not len(classes):  # the inputs are another rank's
            return replace(batch, targets=shares, numbers=None)
        paired = len(inputs) // 2 * 2
        if paired:
            order = self._order(paired, inputs.device)
            with random_state_kept():
                np.random.seed(mix_seed(self._seed, epoch, batch.index))
                mixed, mixed_shares = self._mixup(inputs[order], classes[order])
            inputs[order], shares[order] = mixed, mixed_shares.to(shares.dtype)
        return replace(batch, inputs=inputs[wanted], targets=shares[wanted], numbers=None)


def _pairs_first_and_last(count: int) -> Tensor:
    """Return the order in which samples 2j and 2j + 1 stand at i and `count` - 1 - i.

    >>> _pairs_first_and_last(6).tolist()
    [0, 2, 4, 5, 3, 1]
    """
    even = torch.arange(0, count, 2)
    return torch.cat([even, even.flip(0) + 1])
