"""What the scheduler is told, and whom it tells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from echelon.coordinator.window import WindowSums
from echelon.messages.identity import RunKeys

SETUP_TASK = 2**50


@dataclass(frozen=True)
class TrainingPlan:
    """How long to train, and when to evaluate and save; 0 and None: never."""

    epochs: int
    max_steps: int
    eval_every: int
    save_steps: int | None
    save_s: float | None


@dataclass(frozen=True)
class CoordinationPolicy:
    """Which servers there are, and how steps are given out.

    Attributes:
        servers: how many are waited for.
        standbys: of each server.
        shared: a step is cut into a share for each worker, and the next begins when it is complete; else whole steps
            are given out as fast as workers ask.
        backup: with `shared`, a step is complete without this many of its shares.
        bound: without `shared`, how many steps a worker may be ahead of the slowest; None: any number.
    """

    servers: int = 0
    standbys: int = 0
    shared: bool = False
    backup: int = 0
    bound: int | None = None


@dataclass(frozen=True)
class SchedulerConfig:
    """What the scheduler is told when it starts."""

    policy: CoordinationPolicy
    keys: RunKeys
    address: str
    folder: Path
    plan: TrainingPlan
    timeout_s: float


@dataclass(frozen=True)
class Callbacks:
    """What others do with what happens: the run's record, the display."""

    started: Callable[[dict[str, Any]], None]
    window: Callable[[WindowSums], None]
    reviewed: Callable[[int, dict[str, Any]], None]
