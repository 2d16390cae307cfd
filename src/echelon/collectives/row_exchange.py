"""Exchanges rows of tables that are cut over ranks: each fetches what it looks up, and sends the gradients back.

    forward   row numbers to the ranks that have the rows, and their values back
    backward  g[r] = sum over ranks k that looked up row r of decode(encode(g_k[r])), on the rank that has r

A row number takes 4 bytes (8 of a table with more than 2^31 - 1 rows). Values that a rank looks up itself stay there.

Shapes: R rows that this rank looks up, A rows that others and itself look up here, D values of a row, N ranks.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.collectives.row_reducer import Rows, as_bytes, index_dtype, summed
from echelon.collectives.transfer import PeerLostError
from echelon.collectives.wire import SHOWN, WireCount, framing_bytes
from echelon.compression.base import Codec, Meta, State
from echelon.core.errors import UserError


class _Form(IntEnum):
    """How a rank's gradients of a lookup travel."""

    NONE = 0  # it touched no row: a sample that counts nothing
    PLAIN = 1
    CODED = 2


@dataclass(frozen=True)
class LookupRoute:
    """Which rows of a table a lookup moved between which ranks.

    Attributes:
        table: its name.
        wanted: rows that this rank looked up at each rank, `N` numbers with the sum R.
        asked: rows that each rank looked up here, with the sum A.
        rows: their numbers within this rank's part, one rank after the other, `(A,)`.
    """

    table: str
    wanted: list[int]
    asked: list[int]
    rows: Tensor


class RowExchange:
    """Moves rows between the ranks of a group, in which nothing else travels.

    Attributes:
        wire: bytes that this rank has sent.
        steps: backward passes of lookups so far, on which the codec's draws depend: part of a run's state.
    """

    def __init__(self, group: dist.ProcessGroup, codec: Codec | None = None, seed: int = 0) -> None:
        """Prepare.

        Args:
            codec: encodes gradients of rows (`Codec.takes_rows`); None: they travel as they are.
            seed: of its draws.
        """
        self.wire, self.steps = WireCount(), 0
        self._group, self._codec, self._seed = group, codec, seed

    def fetch(
        self, name: str, part: Tensor, bounds: Sequence[int], rows: Tensor, trains: bool = True
    ) -> tuple[Tensor, LookupRoute]:
        """Return the values `(R, D)` of rows of a table, and the way that they came; all ranks call it together.

        Args:
            part: the rows that this rank has, `(rows, D)`.
            bounds: rank k has the rows from `bounds[k]` to `bounds[k + 1]`.
            rows: `(R,)` int64, ascending, each once.
            trains: False: to evaluate, which counts as no bytes of training.

        Raises:
            PeerLostError: a rank did not answer before the group's timeout.
            UserError: another rank looks up in another table at the same time.
        """
        kind = "weights" if trains else SHOWN
        ends = torch.searchsorted(rows, torch.tensor(bounds, device=rows.device)).tolist()
        wanted = [stop - start for start, stop in pairwise(ends)]
        asked = self._told(wanted, f"looks up in {name}", rows.device, kind)
        firsts = torch.repeat_interleave(torch.tensor(bounds[:-1]), torch.tensor(wanted)).to(rows.device)
        numbers = self._exchange((rows - firsts).to(index_dtype(bounds[-1])), wanted, asked, kind).long()
        values = self._exchange(part[numbers], asked, wanted, kind)
        return values, LookupRoute(name, wanted, asked, numbers)

    def send_back(self, route: LookupRoute, gradients: Tensor, touches: bool = True) -> Rows:
        """Return the sum of all ranks' gradients of the rows that this one has; all ranks call it together.

        Args:
            gradients: of the rows that this rank looked up, `(R, D)`.
            touches: False: a sample that counts nothing looked them up, which touches none.

        Raises:
            PeerLostError: a rank did not answer before the group's timeout.
        """
        form = self._form(gradients) if touches else _Form.NONE
        forms = self._told([form] * len(route.wanted), f"sends back gradients of {route.table}", gradients.device)
        rank, width = self._group.rank(), gradients.shape[1:]
        pieces = gradients.split(route.wanted)
        messages = [self._packed(route.table, k, form, piece) for k, piece in enumerate(pieces)]
        sizes = [
            0 if k == rank else self._size(_Form(each), count, gradients)
            for k, (each, count) in enumerate(zip(forms, route.asked, strict=True))
        ]
        sent = torch.cat([m if k != rank else m.new_empty(0) for k, m in enumerate(messages)])
        received = self._exchange(sent, [m.numel() if k != rank else 0 for k, m in enumerate(messages)], sizes)
        found = []
        for k, (message, rows) in enumerate(zip(received.split(sizes), route.rows.split(route.asked), strict=True)):
            if forms[k] == _Form.NONE or not len(rows):
                continue
            if k == rank:
                found.append(Rows(rows, pieces[k]))
                continue
            values = self._unpacked(message.clone(), _Form(forms[k]), Meta((len(rows), *width), gradients.dtype))
            found.append(Rows(rows, values))
        self.steps += 1
        return summed(found) if found else Rows(route.rows[:0], gradients[:0])

    def _form(self, values: Tensor) -> _Form:
        """Return how gradients travel: those that the codec cannot hold go as they are, for all to see."""
        if self._codec is None or not values.numel():
            return _Form.PLAIN
        largest = min(self._codec.largest, torch.finfo(values.dtype).max)
        return _Form.CODED if bool((values.abs() <= largest).all()) else _Form.PLAIN

    def _told(self, numbers: Sequence[int], doing: str, device: torch.device, kind: str = "weights") -> list[int]:
        """Tell each rank a number; returns what each tells this one.

        Raises:
            UserError: it is doing something else than this rank, whose rows would be mixed up.
        """
        mark = zlib.crc32(doing.encode())
        own = torch.tensor([[int(number), mark] for number in numbers], dtype=torch.int64, device=device)
        told = self._exchange(own, [1] * len(own), [1] * len(own), kind).tolist()
        others = [k for k, (_, theirs) in enumerate(told) if theirs != mark]
        if others:
            raise UserError(
                f"--parallel table=N: rank {self._group.rank()} of the tables' group {doing}, and rank {others[0]} "
                "does not at the same time: all must look up in the same tables in the same order, whatever their "
                "samples are: leave out table=N, or look up in all of them"
            )
        return [number for number, _ in told]

    def _size(self, form: _Form, rows: int, like: Tensor) -> int:
        """Return the bytes of so many rows' gradients."""
        numel = rows * math.prod(like.shape[1:])
        if form is _Form.NONE or not numel:
            return 0
        if form is _Form.PLAIN:
            return numel * like.element_size()
        assert self._codec is not None
        n_bytes = self._codec.n_bytes(numel)
        assert n_bytes is not None
        return n_bytes

    def _packed(self, table: str, to: int, form: _Form, values: Tensor) -> Tensor:
        """Return gradients as bytes."""
        if form is _Form.NONE or not values.numel():
            return torch.empty(0, dtype=torch.uint8, device=values.device)
        if form is _Form.PLAIN or to == self._group.rank():
            return as_bytes(values)
        assert self._codec is not None
        state = State(f"{table}/{to}", self._seed, self._group.rank(), numbers={"step": self.steps})
        return self._codec.to_bytes(self._codec.compress(values.contiguous(), state))

    def _unpacked(self, message: Tensor, form: _Form, meta: Meta) -> Tensor:
        if form is _Form.PLAIN:
            return message.view(meta.dtype).view(meta.shape)
        assert self._codec is not None
        return self._codec.extract(self._codec.from_bytes(message, meta))

    def _exchange(self, sent: Tensor, to: Sequence[int], of: Sequence[int], kind: str = "weights") -> Tensor:
        """Send `to[k]` rows of a tensor to rank k, one rank after the other; returns the `of[k]` of rank k."""
        received = sent.new_empty((sum(of), *sent.shape[1:]))
        try:
            dist.all_to_all_single(received, sent.contiguous(), list(of), list(to), group=self._group)
        except RuntimeError as error:
            raise PeerLostError(
                f"rank {self._group.rank()} of the group lost a rank that it exchanges rows with: {error}"
            ) from error
        rank, each = self._group.rank(), math.prod(sent.shape[1:]) * sent.element_size()
        others = [count for k, count in enumerate(to) if k != rank and count]
        self.wire.add(kind, sum(others) * each + framing_bytes(len(others), sent.is_cuda))
        return received
