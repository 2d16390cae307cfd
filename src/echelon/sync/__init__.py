"""How and when replicas agree: one file per strategy, found by its file's name."""

from echelon.sync.base import Sync, SyncContext
from echelon.sync.registry import build_sync, check_sync, encodes_gradients, kept_memory, synchronous_steps

__all__ = [
    "Sync", "SyncContext", "build_sync", "check_sync", "encodes_gradients", "kept_memory", "synchronous_steps",
]  # fmt: skip
