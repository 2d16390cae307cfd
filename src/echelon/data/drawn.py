"""Samples that are made anew each time they are drawn, each a pure function of (seed, epoch, draw)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from echelon.data.base import BadSample
from echelon.data.order import Indices
from echelon.data.transforms import InputTransform
from echelon.tasks import nest
from echelon.tasks.nest import Nest


class DrawnSamples(Dataset[tuple[Nest, Nest]], ABC):
    """Inputs and targets with random parts, such as sampled negatives or masked tokens.

    Whoever makes a sample, on any number of ranks and after any stop, makes the same one.

    Attributes:
        specs: of inputs and targets.
        unit_counts: units of the loss of each sample, `(N,)`, where all draws of it have as many; None: they differ.
        at_once: samples that a batch of an evaluation holds at most, where one sample is large; 0: any number.
    """

    specs: tuple[Nest, Nest]
    unit_counts: Indices | None = None
    at_once: int = 0

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of samples, N."""

    @abstractmethod
    def fill(self, epoch: int, draws: Indices, inputs: Nest, targets: Nest) -> None:
        """Write the samples of `draws` to arrays `(len(draws), ...)`.

        Args:
            draws: indices of samples, plus N times how often one was drawn before in this epoch.
        """

    def __getitem__(self, index: int) -> tuple[Nest, Nest]:
        """Return one sample of the first epoch, as tensors."""
        inputs, targets = nest.map_leaves(lambda spec: np.empty((1, *spec.shape), spec.dtype), self.specs)
        self.fill(0, np.array([index]), inputs, targets)
        return nest.map_leaves(lambda array: torch.from_numpy(array)[0], (inputs, targets))


class DrawnRows:
    """Makes rows of drawn samples; what their targets are is not known before."""

    kept = in_memory = True
    lengths: Indices | None = None
    origin: Indices | None = None
    targets: Any = None

    def __init__(self, samples: DrawnSamples, transform: InputTransform | None = None) -> None:
        self._samples, self._transform, self.specs = samples, transform, samples.specs
        self.unit_counts = samples.unit_counts

    def batch_specs(self, draws: Indices) -> tuple[Nest, Nest]:
        """Return the specs of a global batch of inputs and targets."""
        return self.specs

    def fill(self, epoch: int, draws: Indices, inputs: Nest, targets: Nest) -> list[BadSample]:
        """Write the samples of `draws` to `inputs` and `targets`, `(N, ...)` each; none is bad."""
        self._samples.fill(epoch, draws, inputs, targets)
        if self._transform is not None:
            self._transform.apply(epoch, draws, inputs)
        return []
