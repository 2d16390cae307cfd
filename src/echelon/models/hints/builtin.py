"""Models whose class declares its own structure: the built-in ones, and anyone's."""

from __future__ import annotations

from torch import nn

from echelon.core.hints import Hints


def hints(model: nn.Module) -> Hints | None:
    """Return what the model's own class declares as `structure`."""
    found = getattr(model, "structure", None)
    return found if isinstance(found, Hints) else None
