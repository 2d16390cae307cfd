"""Rows that servers make, in checkpoints: written and read a part at a time, so that no worker has a table in memory.

A checkpoint has each table whole, rows that nobody asked for among them, as any other reader expects it; and what the
servers have of each row that exists, for a resume.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from echelon.checkpoint import StoredTensor, StreamedTensor
from echelon.core.shards import Region
from echelon.core.state_tree import StateTree, StateView
from echelon.ps.made_rows import BY_ROW, EXIST, ROWS, VALUE
from echelon.ps.table import KeyRange, KeyTable

PART_BYTES = 4 << 20
"""About as much of a table is in memory at a time."""

ReadRows = Callable[[KeyRange, str, int, int], Tensor]
"""Reads of a key's rows that exist, by name of what, so many from a first one (see `Client.read_rows`)."""


def streamed_tensors(table: KeyTable, keys: Mapping[int, StateView], read: ReadRows) -> dict[str, StreamedTensor]:
    """Return what a checkpoint has of rows that servers make, by the name that it has there.

    Args:
        keys: states of the servers' copy, without these rows.
    """
    found: dict[str, StreamedTensor] = {}
    for name, of_table in server_keys(table).items():
        counts = {key.index: int(keys[key.index][EXIST]) for key in of_table}
        shape = sum(key.rows for key in of_table), of_table[0].width
        found[model_name(name)] = StreamedTensor(
            table.torch_dtype, shape, partial(_whole_table, of_table, counts, table.torch_dtype, read)
        )
        for key in of_table:
            count = counts[key.index]
            for field, (dtype, *of_row) in keys[key.index][BY_ROW].items():
                found[key_name(key, field)] = StreamedTensor(
                    getattr(torch, dtype), (count, *of_row), partial(_parts, key, field, count, read)
                )
    return found


def server_keys(table: KeyTable) -> dict[str, list[KeyRange]]:
    """Return the keys of tables whose rows servers make, by name of the table, in the order of its rows."""
    found: dict[str, list[KeyRange]] = {}
    for key in table.keys:
        if key.begins is not None:
            found.setdefault(key.begins.name, []).append(key)
    return found


def model_name(table: str) -> str:
    """Return what a table is called in a part of a checkpoint."""
    return f"model.{table}"


def key_name(key: KeyRange, field: str) -> str:
    """Return what is called so in a part of a checkpoint that a key has of its rows."""
    return f"ps.{key.index}.{field}"


def without_made(state: StateView, key: KeyRange, stored: StateView) -> StateTree:
    """Return a key's state as a checkpoint has it, whose rows lie elsewhere."""
    rest = {name: value for name, value in state.items() if name != BY_ROW}
    return {**rest, "made": {field: stored[key_name(key, field)] for field in state[BY_ROW]}}


def first_put(state: StateTree) -> StateTree:
    """Return what a server is given first of a key's state: all but its rows, and what there will be of each."""
    if "made" not in state:
        return state
    return {**state, "made": {name: _read(stored, 0, 0) for name, stored in state["made"].items()}}


def more_puts(state: StateView) -> Iterator[StateTree]:
    """Yield a key's rows that exist, a part at a time, as `Client.put_rows` takes them."""
    made: Mapping[str, StoredTensor] = state.get("made", {})
    if not made:
        return
    count = int(state[EXIST])
    step = _rows_at_a_time(made[VALUE].shape[1])
    for first in range(0, count, step):
        yield {name: _read(stored, first, min(count, first + step)) for name, stored in made.items()}


def _read(stored: StoredTensor, first: int, stop: int) -> Tensor:
    rest = tuple(((0, size),) for size in stored.shape[1:])
    return stored.read(Region(stored.shape, (((first, stop),), *rest)))


def _rows_at_a_time(width: int) -> int:
    return max(1, PART_BYTES // (8 * width))


def _parts(key: KeyRange, name: str, count: int, read: ReadRows) -> Iterator[Tensor]:
    step = _rows_at_a_time(key.width)
    for first in range(0, count, step):
        yield read(key, name, first, min(step, count - first))


def _whole_table(
    keys: list[KeyRange], counts: Mapping[int, int], dtype: torch.dtype, read: ReadRows
) -> Iterator[Tensor]:
    """Yield a table from its first row to its last: rows that exist, and between them those that begin yet."""
    for key in keys:
        assert key.begins is not None
        count, step = counts[key.index], _rows_at_a_time(key.width)
        numbers, values = _parts(key, ROWS, count, read), _parts(key, VALUE, count, read)
        rows, of_rows = torch.zeros(0, dtype=torch.int64), torch.zeros((0, key.width), dtype=dtype)
        for first in range(0, key.rows, step):
            stop = min(key.rows, first + step)
            block = key.begins.values(torch.arange(first, stop), key.width, dtype)
            while not len(rows) or int(rows[-1]) < stop:
                more = next(numbers, None)
                if more is None:
                    break
                rows, of_rows = torch.cat([rows, more]), torch.cat([of_rows, next(values)])
            here = int(torch.searchsorted(rows, stop))
            block[rows[:here] - first] = of_rows[:here]
            rows, of_rows = rows[here:], of_rows[here:]
            yield block
