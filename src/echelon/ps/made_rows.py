"""Rows of a key that exist: a server holds those that were changed, and makes all others again from how they begin.

Each row that is made gets the next slot of the key's value and of the optimizer's state, which grow with them. So a
server's memory, and what it saves, depends on the rows that were trained, not on the size of the table.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from echelon.core.state_tree import StateTree
from echelon.ps.table import KeyRange

ROWS, VALUE, UPDATES, OPTIMIZER = "rows", "value", "updates", "optimizer."
"""Names of what a state has of each row that exists; of the optimizer's entries, what they begin with."""

EXIST, BY_ROW = "exist", "by_row"
"""Of a state without the rows: how many exist, and what there is of each (its name, type and shape)."""

_MOST_NEW = 2**16
_LEAST_SLOTS = 64
_GROWTH = 1.5


class RowSlots:
    """Which slot each row has that was made, `(R,)`.

    Ascending numbers, so that a search finds a row. The newest rows are apart, so that to add a few costs no sorting of
    all.

    Attributes:
        count: rows that were made.
    """

    def __init__(self) -> None:
        self.count = 0
        none = torch.zeros(0, dtype=torch.int64)
        self._most, self._newest = (none, none), (none, none)

    def find(self, rows: Tensor) -> Tensor:
        """Return the slots of rows, `(R,)` both; -1 where a row was not made."""
        slots = torch.full_like(rows, -1)
        for numbers, where in (self._most, self._newest):
            if len(numbers):
                at = torch.searchsorted(numbers, rows).clamp(max=len(numbers) - 1)
                slots = torch.where(numbers[at] == rows, where[at], slots)
        return slots

    def add(self, rows: Tensor) -> None:
        """Give rows `(R,)` the next slots, in their order; none of them may have one."""
        slots = torch.arange(self.count, self.count + len(rows))
        self.count += len(rows)
        self._newest = _merged(self._newest, (rows, slots))
        if len(self._newest[0]) > _MOST_NEW:
            self._most = _merged(self._most, self._newest)
            self._newest = (rows[:0], slots[:0])

    def in_order(self) -> tuple[Tensor, Tensor]:
        """Return all rows, ascending, and their slots."""
        return _merged(self._most, self._newest)


def _merged(one: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    rows, order = torch.cat([one[0], other[0]]).sort()
    return rows, torch.cat([one[1], other[1]])[order]


def grown(slots: int, count: int, rows: int) -> int:
    """Return for how many slots there is to be room, where so many are needed of a key of so many rows."""
    return slots if count <= slots else min(rows, max(_LEAST_SLOTS, count, int(slots * _GROWTH)))


def grow_state(optimizer: torch.optim.Optimizer, view: nn.Parameter, fresh: torch.optim.Optimizer) -> None:
    """Give a table's optimizer state room for more rows; what they begin with is what a new optimizer gives them.

    Args:
        view: the rows that had room so far, `(slots, D)`.
        fresh: a new optimizer of those that come behind them alone.
    """
    (more,) = (parameter for group in fresh.param_groups for parameter in group["params"])
    begins, state = fresh.state.get(more, {}), optimizer.state.get(view, {})
    for name, tensor in state.items():
        if is_by_row(tensor, view):
            state[name] = torch.cat([tensor, begins[name] if name in begins else torch.zeros_like(more)])


def is_by_row(value: object, view: Tensor) -> bool:
    """Whether an entry of an optimizer's state is of a table's rows, `(R, D)` as their `view` is."""
    return isinstance(value, Tensor) and value.shape == view.shape


def values_of(made: Mapping[str, Tensor], rows: Tensor, key: KeyRange, dtype: torch.dtype) -> Tensor:
    """Return rows of a state's table, `(R, D)`: those that exist, and the others as they begin.

    Args:
        made: what the state has of rows that exist.
    """
    numbers = made[ROWS]
    at = torch.searchsorted(numbers, rows).clamp(max=max(0, len(numbers) - 1))
    exists = numbers[at] == rows if len(numbers) else torch.zeros(len(rows), dtype=torch.bool)
    return with_first(rows, exists, made[VALUE][at[exists]], key, dtype)


def with_first(rows: Tensor, exists: Tensor, values: Tensor, key: KeyRange, dtype: torch.dtype) -> Tensor:
    """Return rows `(R, D)`: `values` where one exists, and what it begins with elsewhere."""
    assert key.begins is not None
    found = torch.empty((len(rows), key.width), dtype=dtype)
    found[exists] = values
    found[~exists] = key.begins.values(rows[~exists], key.width, dtype)
    return found


def without_rows(state: StateTree) -> StateTree:
    """Return a key's state with how many rows exist, and what there is of each, in place of these.

    They are read, and put, a part at a time: a worker need not have room for all.
    """
    if "made" not in state:
        return state
    made: Mapping[str, Tensor] = state["made"]
    about = {name: [str(tensor.dtype).removeprefix("torch."), *tensor.shape[1:]] for name, tensor in made.items()}
    rest = {name: value for name, value in state.items() if name != "made"}
    return {**rest, EXIST: len(made[ROWS]), BY_ROW: about}
