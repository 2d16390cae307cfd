"""head: the classifier alone, on features that stay as they are (a linear probe).

Helps: with very little data, or to look at what features are worth. What is frozen sends no byte.
Needs: features that are worth something: --weights.
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
