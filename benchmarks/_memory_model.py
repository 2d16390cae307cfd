"""Models of `memory.py limit`, for `echelon train --model _memory_model:large`."""

from __future__ import annotations

from typing import Any

from echelon.models import ModelInput
from echelon.models.builtin.small_vit import Size, SmallViT


def small(data: ModelInput) -> Any:
    """Build a ViT that takes no memory to speak of."""
    return SmallViT(data, Size(depth=2, width=32, heads=8, hidden=64))


def large(data: ModelInput) -> Any:
    """Build a ViT of 59 M parameters."""
    return SmallViT(data, Size(depth=12, width=640, heads=8, hidden=2560))
