"""Elastic averaging SGD: replicas are pulled to a common centre, and the centre to them (Zhang et al. 2015).

Helps: Slow links, if replicas should explore on their own while a centre holds them together.
Costs: a copy of the parameters (the centre), and settings that are harder to find than those of local(...).
Needs: a period and beta that suit the learning rate.

After every `period` steps, with N replicas x_i and the centre c (n_j: samples seen by replica j; arXiv:1412.6651):

    m    = sum_j n_j (x_j - c) / sum_j n_j
    x_i <- x_i - alpha (x_i - c)        alpha = beta / N
    c   <- c + beta m                   equal n_j: c + alpha sum_j (x_j - c)

Every replica holds the same centre, which is what is evaluated and saved. BatchNorm statistics are averaged. The
gradient of the next step is taken at the replica's new position (in the paper: at its old one).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Annotated, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.core.bounds import Bounds, OneOf, check_bounds
from echelon.core.errors import UserError
from echelon.core.state_tree import StateTree, StateView
from echelon.sync.averaging.engine import Averaging
from echelon.sync.averaging.plan import AveragingPlan
from echelon.sync.averaging.settings import AveragingSettings
from echelon.sync.base import Sync, SyncContext

PAPERS_BETA = 0.9


@dataclass(frozen=True)
class EasgdSettings(AveragingSettings):
    """Settings of `easgd`.

    Attributes:
        period: steps between agreements.
        beta: how far the centre moves towards the replicas' mean, N alpha; left out, without rho: 0.9, as in the paper.
        rho: strength of the pull relative to the learning rate, alpha = lr rho, in place of beta.
        optimizer_state: what an agreement does to the optimizer's moments: keep each replica's own, average or reset
            them.
    """

    name: ClassVar[str] = "easgd"
    centred: ClassVar[bool] = True
    period: Annotated[int, Bounds(least=1)]
    beta: Annotated[float | None, Bounds(above=0, most=1, hint="0.9 is the paper's")] = None
    rho: Annotated[float | None, Bounds(above=0)] = None
    optimizer_state: Annotated[str, OneOf(("keep", "average", "reset"))] = "keep"

    def __post_init__(self) -> None:
        if self.beta is not None and self.rho is not None:
            raise ValueError("beta and rho both set the force: give one of them")
        check_bounds(self)
        self.plan()

    def plan(self) -> AveragingPlan:
        """Return when what is averaged."""
        return AveragingPlan(self.period, optimizer_state=self.optimizer_state)

    def build(self, context: SyncContext) -> Sync:
        """Build the strategy.

        Raises:
            UserError: rho is too large for this learning rate and number of replicas.
        """
        replicas = dist.get_world_size(context.group) if context.group is not None else 1

        lr = float(context.optimizer.param_groups[0]["lr"]) if self.rho is not None else 0.0
        if self.rho is not None and replicas * lr * self.rho > 1:
            raise UserError(
                f"easgd(rho={self.rho:g}): {replicas} workers x lr {lr:g} x rho is above 1: "
                f"the centre would overshoot; use rho up to {1 / (replicas * lr):g}"
            )
        return Averaging(context, self.plan(), partial(self._rule, context.optimizer))

    def _rule(self, optimizer: torch.optim.Optimizer, replicas: int) -> Elastic:
        def alpha() -> float:
            """Return the moving rate: beta / replicas, or the present learning rate times rho."""
            if self.rho is None:
                return (self.beta or PAPERS_BETA) / replicas
            group = optimizer.param_groups[0]
            return float(group["lr"]) / group.get("lr_scale", 1.0) * self.rho

        return Elastic(alpha, replicas)


STRATEGY = EasgdSettings


class Elastic:
    """Draws a replica to the centre (the anchor) and the centre to the replicas' mean."""

    centred = True

    def __init__(self, alpha: Callable[[], float], replicas: int) -> None:
        self._alpha, self._replicas = alpha, replicas

    def settle(self, period: int) -> None:
        """Do nothing: the force is that of each agreement."""

    def agree(self, name: str, current: Tensor, anchor: Tensor, mean: Tensor) -> Tensor:
        """Move both, of one shape, each by where the other was."""
        alpha = self._alpha()
        moved = torch.lerp(current, anchor, alpha)
        anchor.add_(mean, alpha=alpha * self._replicas)
        return moved

    def state_dict(self) -> StateTree:
        """Return nothing: the centre is the anchor."""
        return {}

    def load_state_dict(self, state: StateView) -> None:
        """Take nothing back."""
