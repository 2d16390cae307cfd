"""Strategies by name: the files of this folder that assign to `STRATEGY`. Naming them imports no torch."""

from __future__ import annotations

from echelon.core.registry import Registry
from echelon.sync.settings import SyncSettings

STRATEGIES = Registry("echelon.sync", "strategy", "STRATEGY")


def names() -> list[str]:
    """Return the names of the strategies that exist."""
    return STRATEGIES.names()


def uses_servers(text: str) -> bool:
    """Whether servers hold the parameters with the strategy that a spec names, as its file says; imports no torch.

    Raises:
        UserError: an unknown strategy.
    """
    return STRATEGIES.constants(text).get("uses_servers") == "True"


def read(text: str) -> SyncSettings:
    """Return the strategy that a spec describes.

    Raises:
        UserError: an unknown strategy or setting, or an impossible value.
    """
    settings: SyncSettings = STRATEGIES.build(text)
    return settings
