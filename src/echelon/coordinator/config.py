"""What the coordinator is told when it starts: how long to train, which servers there are, how work is given out."""

from __future__ import annotations

import math
from dataclasses import dataclass

CONTINUES = "continues"
"""How a launch ended whose run goes on in another, in which more of the model is trained."""


@dataclass(frozen=True)
class TrainingPlan:
    """How long to train, and when to evaluate and save; 0 and None: never.

    Attributes:
        early_stop: after so many evaluations in a row without improvement.
        time_left_s: until the command is to have ended, from the coordinator's start.
        until_epoch: the epochs after which this launch ends and another one goes on; 0: none does.
    """

    epochs: int
    max_steps: int
    eval_every: int
    save_steps: int | None
    save_s: float | None
    early_stop: int = 0
    time_left_s: float = math.inf
    until_epoch: int = 0

    def steps(self, steps_per_epoch: int) -> int:
        """Return the steps of the whole run."""
        steps = self.epochs * steps_per_epoch
        return min(steps, self.max_steps or steps)

    def last_step(self, steps_per_epoch: int) -> int:
        """Return the steps that are done when this launch ends."""
        steps = self.steps(steps_per_epoch)
        return min(steps, self.until_epoch * steps_per_epoch or steps)

    def goes_on(self, steps_per_epoch: int) -> bool:
        """Whether another launch trains the rest."""
        return self.last_step(steps_per_epoch) < self.steps(steps_per_epoch)


@dataclass(frozen=True)
class CoordinationPolicy:
    """Which servers there are, and how steps are given out.

    Attributes:
        servers: how many are waited for.
        standbys: of each server.
        shared: a step is cut into a share for each worker, and the next begins when it is complete; else shares of
            steps, as many as the run began with, are given out as fast as workers ask.
        backup: with `shared`, a step is complete without this many of its shares.
        bound: without `shared`, how many leases a worker may be ahead of the slowest; None: any number.
        ahead: with `shared`, who has computed its share begins the next step, and waits in it for each parameter.
    """

    servers: int = 0
    standbys: int = 0
    shared: bool = False
    backup: int = 0
    bound: int | None = None
    ahead: bool = False


@dataclass(frozen=True)
class CoordinatorConfig:
    """What the coordinator is told when it starts; without a worker for `timeout_s` it gives the run up.

    `workers` are those that the run begins with: they are waited for, but not for long.
    """

    policy: CoordinationPolicy
    plan: TrainingPlan
    timeout_s: float
    workers: int = 0
