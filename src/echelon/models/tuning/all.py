"""all: every parameter is trained, unless the model itself has frozen it.

Helps: With enough data to change all of the weights.
Costs: memory for the gradient and optimizer state of every parameter.
Needs: nothing.
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
