"""The interface of a path: along which ranks the pieces of a vector travel to be summed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from echelon.collectives.schedule import Step


class Path(ABC):
    """One way through the ranks. Subclasses are frozen dataclasses of their settings, named like their file.

    Attributes:
        name: the spec name.
        by_backend: the backend's own all-reduce does it; there is no schedule.
    """

    name: ClassVar[str]
    by_backend: ClassVar[bool] = False

    @abstractmethod
    def schedule(self, rank: int, size: int, numel: int) -> list[Step]:
        """Return this rank's steps to sum vectors of `numel` elements over ranks 0..size-1, for any size and length."""

    def slow_hop(self, rank: int, size: int) -> int | None:
        """Return how many ranks share a group whose links are faster than those between groups; None: all are alike.

        A codec is then used between groups alone.
        """
        return None

