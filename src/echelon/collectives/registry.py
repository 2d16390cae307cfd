"""From a spec such as `hierarchical(group=4)` to a path. Naming paths imports no torch."""

from __future__ import annotations

import importlib
import pkgutil

from echelon.collectives import paths
from echelon.collectives.base import Path
from echelon.core.errors import unknown
from echelon.core.spec import bind, parse_spec


def names() -> list[str]:
    """Return the paths that exist: the files of `paths/`."""
    return sorted(module.name for module in pkgutil.iter_modules(paths.__path__))


def build(text: str) -> Path:
    """Build the path that a spec names.

    Raises:
        UserError: an unknown path or setting, or an impossible value.
    """
    spec = parse_spec(text)
    if spec.name not in names():
        raise unknown("collective", spec.name, names())
    settings: type[Path] = importlib.import_module(f"{paths.__name__}.{spec.name}").PATH
    return bind(spec, settings)
