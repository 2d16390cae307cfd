"""all: every parameter is trained, as the model has it.

Helps: where there is data enough to move all of the weights.
Needs: memory for every parameter's gradient and optimizer state.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from torch import nn

from echelon.models.tuning.base import TuningKind


@dataclass(frozen=True)
class All(TuningKind):
    """Settings of `all`."""

    def trained(self, model: nn.Module) -> Set[str] | None:
        """Return every name."""
        return {name for name, _ in model.named_parameters(remove_duplicate=False)}


TUNING = All
