"""The interface of a path: along which ranks the pieces of a vector travel to be summed."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from echelon.collectives.schedule import PathStep, Ring
from echelon.core.bounds import OneOf, check_bounds
from echelon.core.shards import Span

READY, PRIORITY = "ready", "priority"


@dataclass(frozen=True)
class Tiers:
    """Where a rank stands among groups with fast links inside and slow ones between.

    Attributes:
        inside: the ranks of its group.
        between: the owners of the same piece in all groups; None where this rank owns none.
        pieces: what each member of the group owns of a vector.
        spread_round: first round of spreading the result inside.
    """

    inside: Ring
    between: Ring | None
    pieces: Sequence[Span]
    spread_round: int


@dataclass(frozen=True, kw_only=True)
class Path(ABC):
    """One way through the ranks. Subclasses are frozen dataclasses of their settings, named like their file.

    Attributes:
        order: of the gradients of a step; `ready`: as backward makes them; `priority`: in pieces, what the next forward
            pass needs first, and each parameter is updated when its sum has come.
        name: the spec name.
        examples: specs that show its settings, the simplest first; every law is tried on each. Empty: the name alone.
        by_backend: the backend's own all-reduce does it; there is no schedule.
        is_choice: other paths are tried before the first step, and each size takes the fastest.
    """

    name: ClassVar[str]
    examples: ClassVar[tuple[str, ...]] = ()
    by_backend: ClassVar[bool] = False
    is_choice: ClassVar[bool] = False
    order: Annotated[str, OneOf(("ready", "priority"))] = "ready"

    def __post_init__(self) -> None:
        check_bounds(self)

    @property
    def by_priority(self) -> bool:
        """Whether what forward needs first is summed first."""
        return self.order == PRIORITY

    @abstractmethod
    def schedule(self, rank: int, size: int, numel: int) -> list[PathStep]:
        """Return this rank's steps to sum vectors of `numel` elements over ranks 0..size-1, for any size and length."""

    def for_bytes(self, n_bytes: int) -> Path:
        """Return the path that a vector of so many bytes takes: itself, but for a choice by size."""
        return self

    def tiers(self, rank: int, size: int, numel: int) -> Tiers | None:
        """Return the groups whose links are faster than those between them; None: all links are alike.

        A codec is then used between the groups alone.
        """
        return None
