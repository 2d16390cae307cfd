"""Models whose steps, or whose checkpoints, take as long as they say: truths to plant."""

from __future__ import annotations

import os
import time
from typing import Any

from torch import Tensor, nn

from echelon.checkpoint import CheckpointStore
from echelon.models.base import ModelInput

PAUSE_S = 0.06
SAVE_S = 0.3
SAMPLE_S = 0.001
STALL_S = 0.5
STALL_PASS = 40


class Slept(nn.Module):
    """Two layers on small images, and a pause in each forward pass of training."""

    def __init__(self, data: ModelInput, pause_s: float) -> None:
        super().__init__()
        self._pause_s = pause_s
        self.layers = nn.Sequential(
            nn.Flatten(), nn.Linear(data.channels * data.image_size**2, 64), nn.ReLU(), nn.Linear(64, data.classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return logits `(B, classes)`."""
        if self.training:
            time.sleep(self._pause_s)
        logits: Tensor = self.layers(x)
        return logits


def once(data: ModelInput) -> nn.Module:
    """A step of one pause."""
    return Slept(data, PAUSE_S)


def twice(data: ModelInput) -> nn.Module:
    """A step of two pauses."""
    return Slept(data, 2 * PAUSE_S)


class SlowRank(Slept):
    """Each sample takes `SAMPLE_S`, four times as long on the last rank."""

    def __init__(self, data: ModelInput) -> None:
        super().__init__(data, 0.0)
        self._sample_s = SAMPLE_S * (
            4 if os.environ.get("RANK") == str(int(os.environ.get("WORLD_SIZE", 1)) - 1) else 1
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return logits `(B, classes)`."""
        if self.training:
            time.sleep(self._sample_s * len(x))
        return super().forward(x)


def slow_rank(data: ModelInput) -> nn.Module:
    """A model of one slow rank, the last one."""
    return SlowRank(data)


class Stalled(Slept):
    """One forward pass of training takes `STALL_S` longer."""

    def __init__(self, data: ModelInput) -> None:
        super().__init__(data, 0.0)
        self._passes = 0

    def forward(self, x: Tensor) -> Tensor:
        """Return logits `(B, classes)`."""
        self._passes += self.training
        if self._passes == STALL_PASS and self.training:
            time.sleep(STALL_S)
        return super().forward(x)


def stalled(data: ModelInput) -> nn.Module:
    """A model of quick steps, of which one is slow."""
    return Stalled(data)


def slow_to_save(data: ModelInput) -> nn.Module:
    """A model of quick steps, in a process whose checkpoints each take `SAVE_S` longer to copy."""
    save = CheckpointStore.save

    def slow(store: CheckpointStore, *state: Any, **options: Any) -> None:
        time.sleep(SAVE_S)
        save(store, *state, **options)

    CheckpointStore.save = slow  # type: ignore[method-assign]
    return Slept(data, 0.0)
