"""What a server is told when it starts, and what it counts of its work."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from echelon.compression import Compression
from echelon.coordinator.scheduling import CoordinationPolicy
from echelon.messages.identity import RunKeys
from echelon.ps.keystore import MakeOptimizer
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
    frame_bytes: int = 1 << 30


@dataclass
class Load:
    """What a server did since its start."""

    updates: int = 0
    duplicates: int = 0
    late: int = 0
    busy_s: float = 0.0
    staleness: Counter[int] = field(default_factory=Counter)


def coordination_policy(settings: ServerSettings) -> CoordinationPolicy:
    """Return how a parameter server with these settings is coordinated."""
    bound = settings.staleness if settings.mode == "ssp" and not settings.aggregates else None
    return CoordinationPolicy(settings.servers, settings.replicas, settings.aggregates, settings.backup, bound)
