"""last: the last blocks, and everything after them, are trained.

Helps: With little data that is similar to the old.
Costs: backward runs only through these blocks.
Needs: --weights.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import Annotated

from torch import nn

from echelon.core.bounds import Bounds, check_bounds
from echelon.core.errors import UserError
from echelon.models.tuning.base import TuningKind, blocks_of
from echelon.models.weights import head_names


@dataclass(frozen=True)
class Last(TuningKind):
    """Settings of `last`.

    Attributes:
        blocks: number of blocks, counted from the end of the model.
    """

    blocks: Annotated[int, Bounds(least=1)] = 1

    def __post_init__(self) -> None:
        check_bounds(self)

    def trained(self, model: nn.Module) -> Set[str] | None:
        """Return the names from the first of the blocks on, in the order in which the model declares them.

        Raises:
            UserError: the model has fewer blocks.
        """
        blocks, head = blocks_of(model), head_names(model)
        while len(blocks) > 1 and _is_behind(model, blocks[-1], head):
            blocks.pop()
        if len(blocks) < self.blocks:
            raise UserError(f"--tune last({self.blocks}): {type(model).__name__} has {len(blocks)} blocks")
        names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
        first = next(i for i, name in enumerate(names) if name.startswith(f"{blocks[-self.blocks]}."))
        return set(names[first:])


def _is_behind(model: nn.Module, name: str, head: Set[str]) -> bool:
    """Whether a module is no block but what stands behind the last one: a normalisation, with the head or without."""
    return all(p.ndim == 1 or each in head for each, p in model.get_submodule(name).named_parameters(name))


TUNING = Last
