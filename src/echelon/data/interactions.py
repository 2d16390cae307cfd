"""Implicit feedback: who took what, and when. What was not taken is drawn by chance; the last of each user is held out.

Leave-last-out: the last item of each user is for the test, the one before for validation, all others are trained on
(as in He et al. 2017, "Neural collaborative filtering"). Users of fewer than three items are only trained on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from echelon.core.errors import UserError
from echelon.data.base import DataInfo, DataRequest, Source
from echelon.data.column_numbers import in_order, is_string, read_strings
from echelon.data.columns import (
    UNSEEN,
    Form,
    MeasuredColumns,
    form_of,
    is_id,
    known_values,
    numbered,
    table_digest,
)
from echelon.data.drawn import DrawnSamples
from echelon.data.order import Indices, uniforms
from echelon.data.sample_index import FixedSampleIndex
from echelon.tasks.base import NO_TARGET
from echelon.tasks.nest import Nest, TensorSpec

TIMES = ("timestamp", "time", "datetime", "date")
"""Names of the column that says when, where none is named."""
_LEAST_OF_A_USER = 3  # items: one for the test, one for validation, and one to learn the user from
_PAIRS_AT_ONCE = 2**16  # of users and items that are scored in one batch of an evaluation


@dataclass(frozen=True)
class Histories:
    """Items of each of U users: those of user u are `items[starts[u] : starts[u + 1]]`, ascending, each once."""

    starts: Indices
    items: Indices

    @classmethod
    def of(cls, users: Indices, items: Indices, count: int) -> Histories:
        """Return what `count` users took; the id 0, of items that are not known, is left out."""
        known = items != UNSEEN
        pairs = np.unique(np.stack([users[known], items[known]], axis=1), axis=0)
        return cls(np.searchsorted(pairs[:, 0], np.arange(count + 1)), pairs[:, 1])

    def others(self, users: Indices, uniform: NDArray[np.float64], count: int) -> Indices:
        """Return items that users did not take.

        Args:
            users: `(B,)`.
            uniform: numbers in [0, 1), `(B, K)`, by which they are chosen with equal chances.
            count: of ids; 1 to count - 1 are items.

        Returns:
            `(B, K)`; any items for a user who took all.
        """
        taken = np.diff(self.starts)[users]
        rest = count - 1 - taken
        rank = np.floor(uniform * np.where(rest, rest, count - 1)[:, None]).astype(np.int64)
        # the r-th item that is not in an ascending list has as many of the list before it as have items[i] - i <= r
        owner = np.repeat(np.arange(len(self.starts) - 1), np.diff(self.starts))
        shifted = self.items - 1 - (np.arange(len(self.items)) - self.starts[owner])
        before = np.searchsorted(owner * count + shifted, users[:, None] * count + rank, side="right")
        skipped = np.where(rest[:, None], before - self.starts[users][:, None], 0)
        return rank + 1 + skipped


@dataclass(frozen=True)
class Interactions:
    """What users took: ids of the user and of the item, `(N,)` each.

    Attributes:
        owners: numbers of the users in `histories`, `(N,)`.
        histories: what each user took.
        counts: of ids of users and of items.
    """

    users: Indices
    items: Indices
    owners: Indices
    histories: Histories
    counts: tuple[int, int]


class SampledNegatives(DrawnSamples):
    """Each item that a user took, beside items that the user did not take, drawn with equal chances in each epoch.

    Inputs are ids of the user and of items, `(1 + K,)` each; targets 1 for the item that was taken, 0 for K others.

    Args:
        negatives: K.
    """

    def __init__(self, taken: Interactions, negatives: int, seed: int) -> None:
        self._taken, self._negatives, self._seed = taken, negatives, seed
        given = tuple(TensorSpec((1 + negatives,), "int64", count) for count in taken.counts)
        self.specs = (given, TensorSpec((1 + negatives,), "float32", count=2))

    def __len__(self) -> int:
        return len(self._taken.users)

    def fill(self, epoch: int, draws: Indices, inputs: Nest, targets: Nest) -> None:
        """Write the interactions of `draws`, each with its negatives."""
        taken, indices, (users, items) = self._taken, draws % len(self), inputs
        users[:] = taken.users[indices, None]
        items[:, 0] = taken.items[indices]
        uniform = uniforms(self._seed, epoch, draws, self._negatives)
        items[:, 1:] = taken.histories.others(taken.owners[indices], uniform, taken.counts[1])
        targets[:, 0], targets[:, 1:] = 1, 0


class AllItems(DrawnSamples):
    """Users, each with all items: which one was held out, and which ones the user took before.

    Inputs are ids of the user and of items, `(I,)` each, the item in column i being i; targets 1 for the item that was
    held out, `NO_TARGET` for those that are not ranked, 0 for others. Where no 1 is there, the item is not known.

    Args:
        held_out: the items that were held out; their histories are what is not ranked.
    """

    def __init__(self, held_out: Interactions) -> None:
        self._held, count = held_out, held_out.counts[1]
        self.specs = (
            tuple(TensorSpec((count,), "int64", each) for each in held_out.counts),
            TensorSpec((count,), "float32", count=2),
        )
        self.at_once = max(1, _PAIRS_AT_ONCE // count)

    def __len__(self) -> int:
        return len(self._held.users)

    def fill(self, epoch: int, draws: Indices, inputs: Nest, targets: Nest) -> None:
        """Write users with all items."""
        held, indices, (users, items) = self._held, draws % len(self), inputs
        users[:] = held.users[indices, None]
        items[:] = np.arange(items.shape[1])
        targets[:], targets[:, UNSEEN] = 0, NO_TARGET
        starts, taken = held.histories.starts, held.histories.items
        for row, owner in enumerate(held.owners[indices].tolist()):
            targets[row, taken[starts[owner] : starts[owner + 1]]] = NO_TARGET
        known = held.items[indices] != UNSEEN
        targets[known, held.items[indices[known]]] = 1


@dataclass(frozen=True)
class _Ordered:
    """Rows of a table, each pair of user and item once, those of a user one after the other, by time.

    Attributes:
        table: of users and items.
        users: number of each row's user.
        from_end: how many rows of the user follow.
        size: how many rows each user has, `(U,)`.
        repeated: rows that were left out, as the pair was there before.
    """

    table: pa.Table
    users: Indices
    from_end: Indices
    size: Indices
    repeated: int

    @classmethod
    def of(cls, pairs: pa.Table, times: NDArray[Any]) -> _Ordered:
        """Sort the rows; rows of one time stay in their order."""
        users, items = (column.combine_chunks().dictionary_encode().indices.to_numpy() for column in pairs.columns)
        order = np.lexsort((np.arange(len(users)), times, users))
        both = np.stack([users[order], items[order]], axis=1)
        order = order[np.sort(np.unique(both, axis=0, return_index=True)[1])]
        users = users[order].astype(np.int64)
        size = np.bincount(users)
        from_end = np.cumsum(size)[users] - 1 - np.arange(len(users))
        return cls(pairs.take(pa.array(order)), users, from_end, size, len(both) - len(order))


@dataclass(frozen=True)
class InteractionColumns:
    """Names of the columns of users and of items, and of the one that says when; empty: the order of the rows."""

    inputs: Sequence[str]
    time: str = ""


def time_among(names: Sequence[str], inputs: Sequence[str]) -> str:
    """Return the name of the column that says when, by its name alone; empty: there is none."""
    others = {name.lower(): name for name in names if name not in inputs}
    return next((others[each] for each in TIMES if each in others), "")


def interactions_source(
    request: DataRequest, table: pa.Table, columns: InteractionColumns, measured: MeasuredColumns
) -> Source:
    """Return pairs of users and items with sampled negatives; the last two items of each user are held out.

    Raises:
        UserError: these are not two columns of ids, or nobody has three items.
    """
    inputs, by = columns.inputs, columns.time or "the order of the rows"
    _check_ids(request, table, inputs)
    times = _times(table, columns.time)
    rows = _Ordered.of(table.select(list(inputs)), times)
    held = rows.size[rows.users] >= _LEAST_OF_A_USER
    if not held.any():
        raise UserError(f"no {inputs[0]} has {_LEAST_OF_A_USER} different {inputs[1]}: there is none to hold out")
    trained, before_last, last = ~held | (rows.from_end > 1), held & (rows.from_end == 1), held & (rows.from_end == 0)
    users, items = (
        numbered(each, rows.table[each], measured.of(each, known_values, rows.table[each].filter(pa.array(trained))))
        for each in inputs
    )

    def part(chosen: NDArray[np.bool_], seen: NDArray[np.bool_]) -> Interactions:
        """Return some rows, with what their users took in rows that are seen."""
        histories = Histories.of(rows.users[seen], items.ids[seen], len(rows.size))
        counts = (users.count, items.count)
        return Interactions(users.ids[chosen], items.ids[chosen], rows.users[chosen], histories, counts)

    train = SampledNegatives(part(trained, trained), request.config.negatives, request.seed)
    validation, test = AllItems(part(before_last, trained)), AllItems(part(last, trained | before_last))
    given, wanted = train.specs
    info = DataInfo(
        request.config.source, (), 1, 1, len(train), len(validation), (),
        several=given, targets=wanted, task="recommendation", columns=tuple(inputs),
    )  # fmt: skip
    notes = [
        f"the last {inputs[1]} of each of {len(test):,} {inputs[0]}, by {by}, is the test set, and the one before is "
        f"for validation; each is ranked among all of {items.count - 1:,} that were not taken before"
    ]
    if few := int((rows.from_end[~held] == 0).sum()):
        notes.append(f"{few} {inputs[0]} with fewer than {_LEAST_OF_A_USER} {inputs[1]} are only trained on")
    if rows.repeated:
        notes.append(f"rows that repeat a pair of {inputs[0]} and {inputs[1]}: {rows.repeated}; the first one counts")
    if unknown := int((items.ids[before_last | last] == UNSEEN).sum()):
        notes.append(f"{unknown} of {2 * len(test)} {inputs[1]} held out are in no training row: they count as missed")
    sample_index = FixedSampleIndex.of(request.folder, request.config.source, len(train), table_digest(table))
    return Source(train, validation, info, tuple(notes), test, sample_index)


def _check_ids(request: DataRequest, table: pa.Table, inputs: Sequence[str]) -> None:
    if len(inputs) != 2:
        raise UserError(
            f"--task {request.task} without --target learns from who took what: name two columns, --input USER,ITEM"
        )
    for name in inputs:
        values = table[name]
        if not is_id(values):
            raise UserError(f"column {name} holds {values.type}: ids are whole numbers or strings")
        _refuse_missing(name, values)


def _times(table: pa.Table, name: str) -> NDArray[Any]:
    """Return what rows are ordered by, `(N,)`."""
    if not name:
        return np.arange(len(table))
    values = table[name]
    _refuse_missing(name, values)
    if is_string(values):
        values = read_strings(name, values, "s")
    if form_of(values) is not Form.NUMBERS:
        raise UserError(f"column {name} holds {values.type}: --time is a column of numbers, dates or times")
    return in_order(values)


def _refuse_missing(name: str, values: pa.ChunkedArray) -> None:
    absent = values.is_null(nan_is_null=True)
    if pc.any(absent).as_py():
        row = int(np.flatnonzero(absent.to_numpy())[0]) + 1
        raise UserError(f"{name} is missing in row {row}, {pc.sum(absent).as_py()} times in all: remove such rows")
