"""What this rank sent: bytes in total and by group of parameters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

GROUPS = ("weights", "small", "buffers", "moments")
"""What bytes of training are counted by: parameters (see `SMALL_NUMEL`), statistics of BatchNorm, the optimizer's
moments."""

SHOWN = "shown"
"""What replicas that differ send to show their mean, to be evaluated or saved: no bytes of training."""

SMALL_NUMEL = 1024
"""Parameters of one dimension or fewer elements than this are sent whole: `small`; the others are `weights`."""


@dataclass
class WireCount:
    """Bytes handed to the network by this rank, the backend's framing included; headers of TCP and IP are not.

    Attributes:
        by_group: bytes since the start by group, each of `GROUPS`, and `SHOWN`.
        steps: backward passes whose gradients were reduced.
    """

    by_group: dict[str, int] = field(default_factory=lambda: dict.fromkeys((*GROUPS, SHOWN), 0))
    steps: int = 0

    @property
    def total(self) -> int:
        """All bytes."""
        return sum(self.by_group.values())

    def add(self, group: str, n_bytes: int) -> None:
        """Count bytes for one of the groups."""
        self.by_group[group] += n_bytes


def is_small(parameter: torch.Tensor) -> bool:
    """Whether a parameter (bias, normalisation, tiny matrix) is sent whole instead of encoded."""
    return parameter.dim() < 2 or parameter.numel() < SMALL_NUMEL


def nothing_to_encode(compression: str, parameters: Iterable[torch.nn.Parameter]) -> str:
    """Say that a codec has nothing to do, because all parameters that train are sent whole; empty: it has."""
    if not all(is_small(parameter) for parameter in parameters if parameter.requires_grad):
        return ""
    return (
        f"--compression {compression} does nothing: parameters of one dimension, or of fewer than {SMALL_NUMEL:,} "
        "elements, are sent whole, and the model trains no others"
    )


def framing_bytes(messages: int, on_gpu: bool) -> int:
    """Bytes that gloo adds to messages: three control blocks of 48 (as counted on an interface); NCCL adds none."""
    return 0 if on_gpu else 144 * messages


def ring_bytes(n_bytes: int, world_size: int, on_gpu: bool) -> int:
    """Bytes each rank sends when the backend reduces `n_bytes`: 2 (N - 1) / N of them (Patarasuk and Yuan 2009).

    gloo cuts each of the 2 (N - 1) pieces into two messages.
    """
    return round(2 * (world_size - 1) * n_bytes / world_size) + framing_bytes(4 * (world_size - 1), on_gpu)


def numel_by_group(parameters: Iterable[torch.Tensor]) -> dict[str, int]:
    """Count elements of `weights` and `small` parameters, any shape."""
    count = {"weights": 0, "small": 0}
    for parameter in parameters:
        count["small" if is_small(parameter) else "weights"] += parameter.numel()
    return count
