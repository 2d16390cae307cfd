"""unfreeze: from an epoch on, all is trained, or what a pattern of names matches: head+unfreeze(epoch=3).

Where it begins, optimizer, buckets and codecs begin anew: moments and memories of errors are zero then.

Helps: to let a new head settle before its features move; several steps with a pattern each unfreeze from the head down.
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
        epoch: with which it begins, counted from 1.
        pattern: of modules, with all that is in them, or of parameters; empty: everything.
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
