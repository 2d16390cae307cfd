"""Places that run processes: the files of this folder that say `PLACE = ...`, and `module:Class` of a user's own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from echelon.core.errors import UserError, naming, unknown
from echelon.core.own import find_own
from echelon.core.patience import PATIENCE_S
from echelon.core.registry import Registry

if TYPE_CHECKING:
    from echelon.launch.places.base import Place

PLACES = Registry("echelon.launch.places", "place", "PLACE")


def check_place(name: str) -> None:
    """Refuse a name that no place has, without importing any.

    Raises:
        UserError: with the nearest one.
    """
    if ":" not in name and name not in PLACES.names():
        with naming("--on"):
            raise unknown("place", name, [*PLACES.names(), "module:Class"])


@dataclass(frozen=True)
class PlaceChoice:
    """The place that a description names, a name that exists (`check_place`) or a user's own `module:Class`.

    Attributes:
        patience_s: for how long a process that cannot start yet is tried again.
    """

    name: str
    patience_s: float = PATIENCE_S

    @property
    def runs_here(self) -> bool:
        """Whether one worker alone may run in the process that asks for it."""
        return ":" not in self.name and bool(PLACES.settings_class(self.name).runs_here)

    def build(self) -> Place:
        """Build the place, which its user closes.

        Raises:
            UserError: there is no such place.
        """
        from echelon.launch.places.base import Place

        check_place(self.name)
        own = find_own("--on", self.name) if ":" in self.name else PLACES.settings_class(self.name)
        place = own()
        if not isinstance(place, Place):
            raise UserError(
                f"--on {self.name}: it gives a {type(place).__name__}, not a Place (echelon.launch.places.base)"
            )
        place.patience_s = self.patience_s
        return place
