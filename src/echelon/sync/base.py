"""The contract between the training loop and a strategy by which replicas agree."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn


@dataclass(frozen=True)
class SyncContext:
    """What a strategy acts on.

    Attributes:
        model: the module that this rank holds, on its device.
        update: applies the gradients to the parameters (clipping, optimizer, scaler) and clears them.
        group: the ranks that hold the same piece of the model in other replicas; None for a single process.
    """

    model: nn.Module
    update: Callable[[], None]
    group: dist.ProcessGroup | None
    device: torch.device
    compression: str
    collective: str
    seed: int


class Sync(Protocol):
    """One strategy. Gradients are sums over a replica's samples divided by the size of the *global* batch."""

    module: nn.Module
    """What the forward pass goes through."""

    def micro_batch(self, last: bool) -> AbstractContextManager[object]:
        """Surround forward and backward of a micro-batch; only the last one of a step may communicate."""

    def communication_began(self) -> Any:
        """Return the moment (as the phase clock marks it) from which backward only waited for others; None: never."""

    def step(self) -> None:
        """Agree on what is to be agreed on, then update the parameters."""

    def gather_buffers(self) -> None:
        """Make buffers (BatchNorm statistics) the same on all replicas: before evaluation."""

    def bytes_sent(self) -> Mapping[str, int]:
        """Return the bytes that this rank has sent since the start, by group of parameters."""

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's own state: tensors and plain values only."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` gave on this rank."""
