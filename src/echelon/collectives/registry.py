"""From a spec such as `hierarchical(group=4)` to a path. Naming paths imports no torch."""

from __future__ import annotations

from echelon.collectives.base import Path
from echelon.core.registry import Registry

PATHS = Registry("echelon.collectives.paths", "collective", "PATH", aliases={"auto": "backend"})


def names() -> list[str]:
    """Return the paths that exist: the files of `paths/`."""
    return PATHS.names()


def build(text: str) -> Path:
    """Build the path that a spec names.

    Raises:
        UserError: an unknown path or setting, or an impossible value.
    """
    path: Path = PATHS.build(text)
    return path
