"""What a server is told when it starts, what it counts of its work, and what it wants done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from echelon.compression import Compression
from echelon.coordinator.config import CoordinationPolicy
from echelon.core.state_tree import StateTree
from echelon.messages.framing import Content
from echelon.messages.identity import RunKeys
from echelon.ps.keystore import MakeOptimizer
from echelon.ps.messages import StateOf
from echelon.ps.table import FRAME_BYTES
from echelon.sync.ps import ServerSettings


@dataclass(frozen=True)
class ServerConfig:
    """What a server process is told when it starts. `name` is `server0`, or `standby0` of the same index."""

    name: str
    index: int
    settings: ServerSettings
    keys: RunKeys
    scheduler: str
    address: str
    compression: Compression
    seed: int
    folder: Path
    make_optimizer: MakeOptimizer
    make_row_optimizer: MakeOptimizer | None = None
    frame_bytes: int = FRAME_BYTES


@dataclass
class ServerCounters:
    """What a server did since its start."""

    updates: int = 0
    duplicates: int = 0
    late: int = 0
    busy_s: float = 0.0
    staleness: Counter[int] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class Reply:
    """Send to a worker or to the standby."""

    peer: bytes
    content: Content
    frames: Sequence[Any] = ()


@dataclass(frozen=True, slots=True)
class FileState:
    """Put a state's frames into a file of a place among the run's copies and say so; send them if that cannot be."""

    peer: bytes
    place: str
    content: StateOf
    frames: Sequence[Any]


@dataclass(frozen=True, slots=True)
class TellScheduler:
    """Send to the scheduler."""

    content: Content


@dataclass(frozen=True, slots=True)
class TellPrimary:
    """Send to the server that this one stands by."""

    content: Content


@dataclass(frozen=True, slots=True)
class Follow:
    """Connect to the server at an address, to stand by it in a membership, and to no other; empty: to none."""

    address: str
    membership: int = 0


@dataclass(frozen=True, slots=True)
class SaveSnapshot:
    """Write a state to the disk; `numbers` are the pushes, by peer, that are durable then."""

    count: int
    state: StateTree
    numbers: dict[bytes, int]


Effect = Reply | FileState | TellScheduler | TellPrimary | Follow | SaveSnapshot


def coordination_policy(settings: ServerSettings) -> CoordinationPolicy:
    """Return how a parameter server with these settings is coordinated."""
    bound = settings.staleness if settings.mode == "ssp" and not settings.aggregates else None
    return CoordinationPolicy(
        settings.servers, settings.replicas, settings.aggregates, settings.backup, bound,
        ahead=settings.aggregates and settings.by_priority,
    )  # fmt: skip
