"""Tables of which a worker has no rows: it pulls those that a batch looks up, and pushes what it touched of them.

So a worker's memory depends on its batches, not on the size of a table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from echelon.observe.phases import Phase, PhaseClock
from echelon.ps.client import Client
from echelon.ps.rows import of_keys
from echelon.ps.table import KeyRange
from echelon.ps.worker_state import RowsOf


class RowSum(NamedTuple):
    """Gradients of rows: their numbers `(R,)`, ascending, each once, and values `(R, D)`."""

    indices: Tensor
    values: Tensor


class _Route(NamedTuple):
    """Where looked-up rows belong: their table, and their numbers `(R,)`."""

    name: str
    rows: Tensor


@dataclass
class _OfTask:
    """What a task has of a table: the rows that it has pulled, ascending, and gradients, lookup by lookup."""

    rows: Tensor
    values: Tensor
    gradients: list[RowSum] = field(default_factory=list)


class ServerTables:
    """Gives lookups the rows that servers hold, and keeps their gradients until they are pushed.

    It is the transport of tables that fetch all of their rows (see `parallel.tables`).
    """

    def __init__(self, client: Client, keys: Mapping[str, Sequence[KeyRange]], dtype: torch.dtype, clock: PhaseClock):
        """Take the keys of each table, by its name, in the order of its rows."""
        self._client, self._keys, self._dtype, self._clock = client, keys, dtype, clock
        self._of: RowsOf | None = None  # a task, or a copy that is evaluated
        self._of_task: dict[str, _OfTask] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._keys

    def begin(self, task: int, step: int) -> None:
        """Begin a task of a step: rows of an earlier one may have changed since."""
        self._of, self._of_task = RowsOf(task, step), {}

    def end(self) -> None:
        """End the task: forget its rows and their gradients."""
        self._of, self._of_task = None, {}

    @contextmanager
    def of_copy(self, tag: int) -> Iterator[None]:
        """Give lookups inside the block the rows of a copy that the servers keep."""
        of, self._of = self._of, RowsOf(tag=tag)
        try:
            yield
        finally:
            self._of = of

    def gradient(self, name: str) -> RowSum | None:
        """Return the sum of what a task's lookups in a table have got; None: they got nothing."""
        parts = self._of_task[name].gradients if name in self._of_task else []
        if not parts:
            return None
        if len(parts) == 1:
            return parts[0]
        rows, places = torch.cat([part.indices for part in parts]).unique(return_inverse=True)
        values = parts[0].values.new_zeros((len(rows), parts[0].values.shape[1]))
        return RowSum(rows, values.index_add_(0, places, torch.cat([part.values for part in parts])))

    def fetch(
        self, name: str, part: Tensor, bounds: Sequence[int], rows: Tensor, trains: bool
    ) -> tuple[Tensor, object]:
        """Return the values of rows of a table, ascending, `(R, D)`, pulling those that the task does not have yet.

        Raises:
            RunOver: the run ended without this worker's task.
            TagLost: a server that held the copy died.
        """
        wanted = rows.cpu()
        if self._of is None:
            raise RuntimeError(f"rows of {name} are looked up outside of a step and of an evaluation")
        values = self._pulled(name, wanted, self._of) if self._of.tag else self._of_this_task(name, wanted, self._of)
        return values.to(part.device), _Route(name, wanted)

    def send_back(self, route: _Route, gradients: Tensor, touches: bool) -> RowSum:
        """Keep gradients of looked-up rows `(R, D)` for `gradient`; none of them is of rows that are here."""
        if touches and route.name in self._of_task:
            self._of_task[route.name].gradients.append(RowSum(route.rows, gradients.detach().cpu()))
        return RowSum(route.rows[:0], gradients[:0])

    def _of_this_task(self, name: str, rows: Tensor, of: RowsOf) -> Tensor:
        have = self._of_task.get(name)
        if have is None:
            have = self._of_task[name] = _OfTask(rows, self._pulled(name, rows, of))
            return have.values
        new = rows[~torch.isin(rows, have.rows)]
        if len(new):
            both, order = torch.cat([have.rows, new]).sort()
            have.values = torch.cat([have.values, self._pulled(name, new, of)])[order]
            have.rows = both
        return have.values[torch.searchsorted(have.rows, rows)]

    def _pulled(self, name: str, rows: Tensor, of: RowsOf) -> Tensor:
        """Wait for rows of a table."""
        if not of.tag:
            self._clock.enter(Phase.COMMUNICATE)
        wanted = [(key, within) for key, _, within in of_keys(self._keys[name], rows) if len(within)]
        found = self._client.rows(wanted, of)
        if not of.tag:
            self._clock.enter(Phase.FORWARD)
        return torch.cat(found) if found else torch.empty((0, self._keys[name][0].width), dtype=self._dtype)
