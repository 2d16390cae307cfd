"""From a spec such as `hierarchical(group=4)` to a path. Naming paths imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from echelon.core.registry import Registry

if TYPE_CHECKING:
    from echelon.collectives.base import Path

PATHS = Registry("echelon.collectives.paths", "collective", "PATH")


def names() -> list[str]:
    """Return the paths that exist: the files of `paths/`."""
    return PATHS.names()


def examples() -> dict[str, tuple[str, ...]]:
    """Return, for every path by name, specs that can be built, the simplest first."""
    return {name: PATHS.settings_class(name).examples or (name,) for name in names()}


def build(text: str) -> Path:
    """Build the path that a spec names.

    Raises:
        UserError: an unknown path or setting, or an impossible value.
    """
    path: Path = PATHS.build(text)
    return path
