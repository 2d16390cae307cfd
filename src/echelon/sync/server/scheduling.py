"""What the scheduler is told, and whom it tells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.sync.server.identity import RunKeys
from echelon.sync.server.settings import Settings
from echelon.sync.server.tallies import WindowSums

SETUP_TASK = 2**50


@dataclass(frozen=True)
class Plan:
    """How long to train, and when to evaluate and save; 0 and None: never."""

    epochs: int
    max_steps: int
    eval_every: int
    save_steps: int | None
    save_s: float | None


@dataclass(frozen=True)
class SchedulerConfig:
    """What the scheduler is told when it starts."""

    settings: Settings
    keys: RunKeys
    address: str
    folder: Path
    plan: Plan
    timeout_s: float


@dataclass(frozen=True)
class Callbacks:
    """What others do with what happens: the run's record, the display."""

    started: Callable[[dict[str, Any]], None]
    window: Callable[[WindowSums], None]
    reviewed: Callable[[int, dict[str, Any]], None]
