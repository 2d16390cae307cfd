"""Sums sparse gradients of embedding tables, or what their rows changed by, over the ranks: touched rows alone travel.

    g[r] = sum over ranks k that touched row r of decode(encode(g_k[r]))

Each rank sends its rows, one message of all tables, to each other rank: a 4-byte index and the values of each row.
Every rank adds them up in the order of the ranks, so that all have the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.collectives.transfer import PeerLostError
from echelon.collectives.wire import WireCount, framing_bytes
from echelon.compression.base import Codec, Meta, State
from echelon.core.errors import UserError

_INT32_ROWS = 2**31 - 1


@dataclass(frozen=True)
class Rows:
    """Rows of a table: ascending indices `(R,)`, each once, and values `(R, D)`."""

    indices: Tensor
    values: Tensor

    @classmethod
    def changed(cls, delta: Tensor) -> Rows:
        """Return the rows `(R, D)` of `delta` `(N, D)` that are not zero."""
        indices = delta.flatten(1).any(dim=1).nonzero().flatten()
        return cls(indices, delta[indices])

    @classmethod
    def of(cls, name: str, table: Tensor) -> Rows:
        """Return the rows of a table's gradient.

        Raises:
            UserError: the gradient is dense: the weight was used for more than looking rows up.
        """
        gradient = table.grad
        if gradient is None:
            none = torch.zeros(0, dtype=torch.int64, device=table.device)
            return cls(none, table.new_zeros((0, *table.shape[1:])))
        if not gradient.is_sparse:
            raise UserError(
                f"model: the gradient of {name} is dense, though its table has sparse=True: build it without"
            )
        gradient = gradient.coalesce()
        return cls(gradient.indices()[0], gradient.values())

    def written(self, shape: torch.Size) -> Tensor:
        """Return the sparse gradient of a table of that shape."""
        return torch.sparse_coo_tensor(
            self.indices[None], self.values, shape, is_coalesced=True, check_invariants=False
        )


class RowReducer:
    """Sums the gradients of tables over a group, in place, or rows that it is given.

    Attributes:
        wire: bytes that this rank has sent.
        steps: reductions so far, on which the codec's draws depend: part of a run's state.
    """

    def __init__(
        self,
        tables: Mapping[str, Tensor],
        group: dist.ProcessGroup,
        codec: Codec | None = None,
        seed: int = 0,
        keeps_empty: bool = False,
    ) -> None:
        """Prepare.

        Args:
            tables: weights `(rows, D)` by name, in the same order on all ranks.
            codec: encodes the values of rows (`Codec.takes_rows`); None: they travel as they are.
            seed: of its draws.
            keeps_empty: a table that no rank has touched has a gradient of no rows afterwards.
        """
        self._keeps_empty = keeps_empty
        self.wire, self.steps = WireCount(), 0
        self._tables, self._group, self._codec, self._seed = dict(tables), group, codec, seed

    def reduce(self) -> None:
        """Sum the gradients; a table that no rank has touched has none afterwards. All ranks call it.

        Raises:
            PeerLostError: a rank did not answer before the group's timeout.
            UserError: a gradient is dense.
        """
        totals = self.total({name: Rows.of(name, table) for name, table in self._tables.items()})
        for name, table in self._tables.items():
            total = totals[name]
            table.grad = total.written(table.shape) if len(total.indices) or self._keeps_empty else None

    def total(self, touched: Mapping[str, Rows], sum_whole: Callable[[Tensor], int] | None = None) -> dict[str, Rows]:
        """Return the sum of all ranks' rows by table, the same bits on each. All ranks call it.

        Args:
            touched: rows of each table, in the dtype of its weight.
            sum_whole: sums a tensor `(N, D)` over the ranks in place and returns the bytes that this one sent: for a
                table so many rows of which were touched that it sends less; None: rows travel always.

        Raises:
            PeerLostError: a rank did not answer before the group's timeout.
        """
        encodes = self._codec is not None and all(self._is_codable(rows.values) for rows in touched.values())
        try:
            told = self._exchange_counts([len(rows.indices) for rows in touched.values()], encodes)
            whole = self._take_whole(touched, told, sum_whole) if sum_whole is not None else {}
            parts = [self._packed(name, rows, encodes) for name, rows in touched.items() if name not in whole]
            message = torch.cat(parts) if parts else torch.empty(0, dtype=torch.uint8, device=self._device)
            messages = self._exchange(message, [self._size(counts) for counts in told])
        except RuntimeError as error:
            raise PeerLostError(
                f"rank {self._group.rank()} of the group lost a rank that it sums rows with: {error}"
            ) from error
        by_rank = [
            self._unpacked(message, counts, k) for k, (message, counts) in enumerate(zip(messages, told, strict=True))
        ]
        self.steps += 1
        self.wire.steps += 1
        rows = {name: summed(list(pieces)) for name, *pieces in zip(self._tables, *by_rank, strict=True)}
        return rows | whole

    def _take_whole(
        self, touched: Mapping[str, Rows], told: Sequence[list[int]], sum_whole: Callable[[Tensor], int]
    ) -> dict[str, Rows]:
        """Return all rows of the sums of tables that send less as a whole, along a ring, and set their counts to 0.

        Args:
            told: of each rank the number of rows of each table, and whether its values are encoded.
        """
        whole = {}
        for place, (name, table) in enumerate(self._tables.items()):
            by_rows = sum(sum(self._sizes(table, counts[place], bool(counts[-1]))) for counts in told)
            if by_rows <= 2 * table.numel() * table.element_size():
                continue
            total = torch.zeros_like(table)
            total[touched[name].indices] = touched[name].values
            self.wire.add("weights", sum_whole(total))
            whole[name] = Rows(torch.arange(len(total), device=total.device), total)
            for counts in told:
                counts[place] = 0
        return whole

    @property
    def _device(self) -> torch.device:
        return next(iter(self._tables.values())).device

    def _is_codable(self, values: Tensor) -> bool:
        """Whether the codec can hold these values; those that overflowed travel as they are, for all to see."""
        assert self._codec is not None
        return not values.numel() or bool(
            (values.abs() <= min(self._codec.largest, torch.finfo(values.dtype).max)).all()
        )

    def _packed(self, name: str, rows: Rows, encodes: bool) -> Tensor:
        """Return rows as bytes: indices, then values."""
        indices = as_bytes(rows.indices.to(index_dtype(len(self._tables[name]))))
        if not encodes or not rows.values.numel():
            return torch.cat([indices, as_bytes(rows.values)])
        assert self._codec is not None
        payload = self._codec.compress(rows.values, self._state(name, self._group.rank()))
        return torch.cat([indices, self._codec.to_bytes(payload)])

    def _state(self, name: str, rank: int) -> State:
        return State(name, self._seed, rank, numbers={"step": self.steps})

    def _exchange_counts(self, counts: list[int], encodes: bool) -> list[list[int]]:
        """Return of each rank the number of rows of each table, and whether its values are encoded."""
        own = torch.tensor([*counts, encodes], dtype=torch.int64, device=self._device)
        everyone = [torch.empty_like(own) for _ in range(self._group.size())]
        dist.all_gather(everyone, own, group=self._group)
        others = self._group.size() - 1
        self.wire.add("weights", others * own.nbytes + framing_bytes(others, own.is_cuda))
        return [each.tolist() for each in everyone]

    def _size(self, counts: list[int]) -> int:
        return sum(
            sum(self._sizes(table, n, bool(counts[-1])))
            for table, n in zip(self._tables.values(), counts, strict=False)
        )

    def _sizes(self, table: Tensor, rows: int, encodes: bool) -> tuple[int, int]:
        """Return the bytes of so many rows' indices and of their values."""
        numel = rows * math.prod(table.shape[1:])
        n_bytes = numel * table.element_size()
        if encodes and numel:
            assert self._codec is not None
            coded = self._codec.n_bytes(numel)
            assert coded is not None
            n_bytes = coded
        return rows * index_dtype(len(table)).itemsize, n_bytes

    def _exchange(self, message: Tensor, sizes: list[int]) -> list[Tensor]:
        """Send this rank's bytes to all others; returns everyone's, its own among them."""
        rank, group = self._group.rank(), self._group
        messages = [message if k == rank else message.new_empty(size) for k, size in enumerate(sizes)]
        peers = [(rank + i) % group.size() for i in range(1, group.size())]
        operations = [dist.P2POp(dist.isend, message, group=group, group_peer=k) for k in peers if message.numel()]
        operations += [dist.P2POp(dist.irecv, messages[k], group=group, group_peer=k) for k in peers if sizes[k]]
        sent = len(peers) * (message.numel() + framing_bytes(1, message.is_cuda)) if message.numel() else 0
        self.wire.add("weights", sent)
        for work in dist.batch_isend_irecv(operations) if operations else []:
            work.wait()
        return messages

    def _unpacked(self, message: Tensor, counts: list[int], rank: int) -> list[Rows]:
        """Return a rank's rows of each table; its own are decoded too, for all ranks are to add up the same."""
        found, start = [], 0
        for table, count in zip(self._tables.values(), counts, strict=False):
            shape, encodes = (count, *table.shape[1:]), bool(counts[-1])
            for_indices, for_values = self._sizes(table, count, encodes)
            middle, end = start + for_indices, start + for_indices + for_values
            indices = message[start:middle].clone().view(index_dtype(len(table))).long()
            coded = message[middle:end].clone()  # aligned
            if encodes and count:
                assert self._codec is not None
                values = self._codec.extract(self._codec.from_bytes(coded, Meta(shape, table.dtype)))
            else:
                values = coded.view(table.dtype).view(shape)
            found.append(Rows(indices, values))
            start = end
        return found


def as_bytes(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor, any shape, as a vector of bytes."""
    # A copy: the strides of what has one element may be any, and `contiguous` leaves them.
    return tensor.clone(memory_format=torch.contiguous_format).view(-1).view(torch.uint8)


def index_dtype(rows: int) -> torch.dtype:
    """Return the type in which row numbers of a table with so many travel."""
    return torch.int32 if rows <= _INT32_ROWS else torch.int64


def summed(pieces: list[Rows]) -> Rows:
    """Add rows up, piece by piece: indices are unique within one, so that the order of sums is theirs."""
    indices, places = torch.unique(torch.cat([piece.indices for piece in pieces]), return_inverse=True)
    total = pieces[0].values.new_zeros((len(indices), *pieces[0].values.shape[1:]))
    for piece, into in zip(pieces, places.split([len(piece.indices) for piece in pieces]), strict=True):
        total.index_add_(0, into, piece.values)
    return Rows(indices, total)
