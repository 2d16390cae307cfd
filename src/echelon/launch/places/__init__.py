"""Places that run processes, by name: the files of this folder, and `module:Class` of a user's own."""

from __future__ import annotations

import importlib
import pkgutil
from pathlib import Path

from echelon.core.errors import UserError, naming, unknown
from echelon.core.own import find_own
from echelon.launch.places.base import Place


def names() -> list[str]:
    """Return the names of the places that exist."""
    return sorted(_classes())


def _classes() -> dict[str, type[Place]]:
    """Return the places that the files of this folder define, by name."""
    modules = [m.name for m in pkgutil.iter_modules([str(Path(__file__).parent)]) if m.name != "base"]
    members = [v for m in modules for v in vars(importlib.import_module(f"{__name__}.{m}")).values()]
    return {v.name: v for v in members if isinstance(v, type) and issubclass(v, Place) and v is not Place}


def check_place(name: str) -> None:
    """Refuse a name that no place has, without importing a user's own.

    Raises:
        UserError: with the nearest one.
    """
    if ":" not in name and name not in names():
        with naming("--on"):
            raise unknown("place", name, [*names(), "module:Class"])


def build_place(name: str) -> Place:
    """Build a place from its name.

    Raises:
        UserError: there is no such place.
    """
    check_place(name)
    return _own(name) if ":" in name else _classes()[name]()


def _own(name: str) -> Place:
    place = find_own("--on", name)()
    if not isinstance(place, Place):
        raise UserError(f"--on {name}: it gives a {type(place).__name__}, not a Place (echelon.launch.places.base)")
    return place
