"""unfreeze: from an epoch on, everything is trained, or what a pattern matches: head+unfreeze(epoch=3).

At that epoch the run saves a checkpoint and continues with a new optimizer, new buckets and new codecs, so momentum and
error feedback start at zero.

Helps: To train a new head before the features change. Several unfreeze with a pattern each work down from the head.
Costs: a checkpoint and a restart of the optimizer; with ps, some seconds to restart the servers.
Needs: --weights, and something that is frozen before.

Paper: Howard and Ruder 2018, ULMFiT, section 3.3 (arXiv:1801.06146).
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Annotated

from torch import nn

from echelon.core.bounds import Bounds, check_bounds
from echelon.models.tuning.base import TuningKind, matching


@dataclass(frozen=True)
class Unfreeze(TuningKind):
    """Settings of `unfreeze`.

    Attributes:
        epoch: the first epoch in which more is trained, counted from 1.
        pattern: names of modules, with everything in them, or of parameters, joined by `+`; empty: everything.
    """

    epoch: Annotated[int, Bounds(least=2, hint="epochs count from 1, and what trains from the first is not frozen")]
    pattern: str = ""

    def __post_init__(self) -> None:
        check_bounds(self)

    @property
    def begins(self) -> int:
        """Return the epoch, counted from 0."""
        return self.epoch - 1

    def thawed(self, model: nn.Module) -> Set[str]:
        """Return the names that it matches.

        Raises:
            UserError: it matches none.
        """
        return matching(model, self.pattern or "**", f'unfreeze(epoch={self.epoch}, pattern="{self.pattern}")')


TUNING = Unfreeze
