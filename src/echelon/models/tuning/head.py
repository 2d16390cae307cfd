"""head: only the classifier is trained, on the features of a frozen model (a linear probe).

Helps: With very little data, or to see how good the features are.
Costs: least of all kinds: frozen parameters have no gradient, no optimizer state and no traffic.
Needs: --weights with useful features.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from echelon.models.tuning.base import TuningKind


@dataclass(frozen=True)
class Head(TuningKind):
    """Settings of `head`."""

    trains: ClassVar[str] = "new"

    def trained(self, model: nn.Module) -> Set[str] | None:
        """Return nothing: the head is trained in any case."""
        return frozenset()


TUNING = Head
