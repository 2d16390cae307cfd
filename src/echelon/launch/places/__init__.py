"""Places that run processes: the files of this folder that say `PLACE = ...`, and `module:Class` of a user's own.

A place is named by its spec: `local`, `slurm(nodes=2, time=8h)`. A name of the user's own file of places stands for the
spec that it has there (`expanded`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, is_dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from echelon.config.machines import read_place
from echelon.core.errors import UserError, naming
from echelon.core.own import find_own
from echelon.core.patience import PATIENCE_S
from echelon.core.registry import Registry
from echelon.core.spec import Spec

if TYPE_CHECKING:
    from echelon.launch.places.base import Place
    from echelon.launch.places.cluster import Cluster

PLACES = Registry("echelon.launch.places", "place", "PLACE")
_OWN = re.compile(r"[\w.]+:[\w.]+")


def is_own(text: str) -> bool:
    """Whether a place's name is that of a user's own class, `module:Class`.

    >>> is_own("mine:Place"), is_own("slurm(nodes=1)")
    (True, False)
    """
    return _OWN.fullmatch(text) is not None


def expanded(text: str) -> str:
    """Return a place's spec; a name of the user's file stands for what it has there, and `text` overrides settings.

    Raises:
        UserError: the text, or the file, cannot be read; there is no such place or setting.
    """
    return text if is_own(text) else str(_read(text))


def _read(text: str) -> Spec:
    with naming("--on"):
        spec = read_place(text, PLACES.names())
        PLACES.check(spec)
    return spec


def check_place(text: str) -> None:
    """Refuse a place that does not exist, or settings that it does not have; one without settings is not imported.

    Raises:
        UserError: with the nearest one, or with what a setting must be.
    """
    expanded(text)
    if not is_own(text) and ((spec := _read(text)).args or spec.kwargs):
        with naming("--on"):
            _bound(spec)


def _bound(spec: Spec) -> object:
    """Return the place of a file here; one that is no dataclass has no settings.

    Raises:
        UserError: it has none of these settings.
    """
    settings = PLACES.settings_class(spec.name)
    if is_dataclass(settings):
        return PLACES.bind(spec)
    if spec.args or spec.kwargs:
        raise UserError(f"{spec.name} has no settings: give the name alone")
    return settings()


@dataclass(frozen=True)
class PlaceChoice:
    """The place that a description names: a spec that was checked (`check_place`) or a user's own `module:Class`.

    Attributes:
        patience_s: for how long a process that cannot start yet is tried again.
        stop_s: how long a run may take to stop; None: as the place itself has it.
    """

    name: str
    patience_s: float = PATIENCE_S
    stop_s: float | None = None

    @cached_property
    def _spec(self) -> Spec:
        return _read(self.name)

    @property
    def title(self) -> str:
        """Its name without settings, as it is written: this machine need not know it."""
        return self.name.partition("(")[0]

    @property
    def runs_here(self) -> bool:
        """Whether one worker alone may run in the process that asks for it: not where another is to end it in time."""
        bounded = self.stop_s is not None or is_own(self.name) or bool(self._spec.args or self._spec.kwargs)
        return not bounded and bool(PLACES.settings_class(self._spec.name).runs_here)

    def cluster(self) -> Cluster | None:
        """Return the place, where it takes whole runs; None: it runs processes (`build`).

        Raises:
            UserError: its settings are impossible.
        """
        from echelon.launch.places.cluster import Cluster

        if is_own(self.name):
            return None
        with naming("--on"):
            spec = self._spec
            if not issubclass(PLACES.settings_class(spec.name), Cluster):
                return None
            cluster: Cluster = PLACES.bind(spec)
        return cluster

    def longest_stop_s(self) -> float:
        """Return how long a run there may take from a signal until nothing of it is left, as the place itself has it.

        Raises:
            UserError: there is no such place, or its settings are impossible.
        """
        from echelon.launch.places.base import STOP_S, Place
        from echelon.launch.places.cluster import Cluster

        if is_own(self.name):
            return STOP_S
        with naming("--on"):
            place = _bound(self._spec)
        assert isinstance(place, Place | Cluster)
        return place.stop_s

    def build(self) -> Place:
        """Build a place that runs processes, which its user closes.

        Raises:
            UserError: there is no such place.
        """
        from echelon.launch.places.base import Place

        check_place(self.name)
        place: object
        if is_own(self.name):
            place = find_own("--on", self.name)()
        else:
            with naming("--on"):
                place = _bound(self._spec)
        if not isinstance(place, Place):
            raise UserError(
                f"--on {self.name}: it gives a {type(place).__name__}, not a Place (echelon.launch.places.base)"
            )
        place.patience_s = self.patience_s
        if self.stop_s is not None:
            place.stop_s = self.stop_s
        return place
