"""Places that run processes, by name: the files of this folder, and `module:Class` of a user's own."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
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


@dataclass(frozen=True)
class PlaceChoice:
    """The place that a description names, a name that exists (`check_place`) or a user's own `module:Class`."""

    name: str

    def build(self) -> Place:
        """Build the place, which its user closes.

        Raises:
            UserError: there is no such place.
        """
        check_place(self.name)
        return _own(self.name) if ":" in self.name else _classes()[self.name]()


def _own(name: str) -> Place:
    place = find_own("--on", name)()
    if not isinstance(place, Place):
        raise UserError(f"--on {name}: it gives a {type(place).__name__}, not a Place (echelon.launch.places.base)")
    return place
