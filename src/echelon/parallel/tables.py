"""Embedding tables cut by rows over replicas, which share all other parameters: `--parallel dp=4,table=4`.

Rank k of N has the rows from b[k] to b[k + 1], where the b are as even as can be. A lookup fetches the rows of its ids,
each once, from the ranks that have them; backward leaves the sum of all ranks' gradients, divided by nobody, as a
sparse gradient of the rows that a rank has. So the optimizer updates, and a checkpoint saves, each row on one rank
(model-parallel tables beside data-parallel layers: Naumov et al. 2019, arXiv:1906.00091, section 3).

Every rank must look up in the same tables in the same order, if need be with a sample that counts nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from echelon.core.errors import UserError
from echelon.core.shards import Region, Span, cut


class Fetched(Protocol):
    """The sum of gradients of rows: ascending numbers `(R,)`, each once, and values `(R, D)`."""

    @property
    def indices(self) -> Tensor:
        """Numbers within this rank's part."""

    @property
    def values(self) -> Tensor:
        """Their gradients."""


class RowTransport(Protocol):
    """What moves rows between ranks, which all call it together, or between a worker and servers."""

    def fetch(
        self, name: str, part: Tensor, bounds: Sequence[int], rows: Tensor, trains: bool
    ) -> tuple[Tensor, object]:
        """Return the values `(R, D)` of rows `(R,)` of the whole table, and the way that they came.

        Args:
            part: the rows that this rank has, `(its rows, D)`.
        """

    def send_back(self, route: Any, gradients: Tensor, touches: bool) -> Fetched:
        """Return the sum of all ranks' gradients, `(R, D)` each, of the rows that this one has."""


@dataclass
class TableCut:
    """What a cut table knows beside its rows.

    Attributes:
        name: of its weight.
        bounds: rank k has the rows from `bounds[k]` to `bounds[k + 1]`.
        exchange: moves rows between the ranks.
    """

    name: str
    bounds: tuple[int, ...]
    exchange: RowTransport


class _CutTable(nn.Module):
    """What both kinds have in common.

    Attributes:
        touches_rows: False: what is looked up now is of a sample that counts nothing, and touches no row.
    """

    weight: Tensor
    padding_idx: int | None
    num_embeddings: int
    table_cut: TableCut
    touches_rows = True

    def _looked_up(self, ids: Tensor) -> tuple[Tensor, Tensor, int | None]:
        """Return the rows of some ids, each once `(R, D)`, where each id's row stands there, and the padding's."""
        rows, places = ids.unique(return_inverse=True)
        if len(rows) and not 0 <= int(rows[0]) <= int(rows[-1]) < self.num_embeddings:
            wrong = int(rows[0] if rows[0] < 0 else rows[-1])
            raise IndexError(f"{self.table_cut.name} has no row {wrong}: it has {self.num_embeddings}")
        cut, trains = self.table_cut, torch.is_grad_enabled()
        fetched, route = cut.exchange.fetch(cut.name, self.weight.detach(), cut.bounds, rows, trains)
        values: Tensor = _Lookup.apply(self.weight, fetched, route, self)
        padding = None
        if self.padding_idx is not None:
            at = (rows == self.padding_idx).nonzero()
            padding = int(at) if len(at) else None
        return values, places, padding


class CutEmbedding(_CutTable, nn.Embedding):
    """An embedding of which this rank has some of the rows; `weight` are these."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the vectors of ids (...), (..., D)."""
        values, places, padding = self._looked_up(input)
        return F.embedding(places, values, padding)


class CutEmbeddingBag(_CutTable, nn.EmbeddingBag):
    """Sums or means of embeddings of which this rank has some of the rows; `weight` are these."""

    def forward(
        self,
        input: Tensor,
        offsets: Tensor | None = None,
        per_sample_weights: Tensor | None = None,
    ) -> Tensor:
        """Return a vector for each bag of ids, (B, D)."""
        values, places, padding = self._looked_up(input)
        return F.embedding_bag(
            places,
            values,
            offsets,
            mode=self.mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=self.include_last_offset,
            padding_idx=padding,
        )


_CUT: Mapping[type[nn.Module], type[_CutTable]] = {nn.Embedding: CutEmbedding, nn.EmbeddingBag: CutEmbeddingBag}


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, fetched: Tensor, route: object, table: _CutTable) -> Tensor:
        """Return the values that were fetched, (R, D), as what depends on the rows of all ranks."""
        ctx.route, ctx.table, ctx.shape = route, table, weight.shape
        return fetched.view_as(fetched)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradients: Tensor) -> tuple[Tensor | None, None, None, None]:
        """Return the gradient of the rows that this rank has, sparse; None where it has no rows at all."""
        found = ctx.table.table_cut.exchange.send_back(ctx.route, gradients, ctx.table.touches_rows)
        if not ctx.shape[0]:
            return None, None, None, None
        gradient = torch.sparse_coo_tensor(
            found.indices[None], found.values, ctx.shape, is_coalesced=True, check_invariants=False
        )
        return gradient, None, None, None


@dataclass(frozen=True)
class CutTables:
    """The tables of a model that are cut.

    Attributes:
        group: the ranks that together have their rows.
        spans: the rows that this rank has of each, by the name of its weight.
        regions: the same as regions of the whole tables.
    """

    group: dist.ProcessGroup
    spans: Mapping[str, Span] = field(default_factory=dict)
    regions: Mapping[str, Region] = field(default_factory=dict)

    def squared_norm(self, gradients: Mapping[str, Tensor | None], device: torch.device) -> Tensor:
        """Return the sum of squares of the gradients of all ranks' rows, float64; all ranks call it together.

        Args:
            gradients: of this rank's rows by name of table, `(its rows, D)`, sparse and coalesced.
        """
        total = torch.zeros((), dtype=torch.float64, device=device)
        for name in self.spans:
            gradient = gradients.get(name)
            if gradient is not None:
                total += gradient.values().double().square().sum()
        dist.all_reduce(total, group=self.group)
        return total


def cut_tables(
    model: nn.Module, names: Mapping[str, nn.Parameter], group: dist.ProcessGroup, exchange: RowTransport
) -> CutTables:
    """Cut tables by rows over a group, in place.

    Args:
        names: their weights, by name: whole, or this rank's rows already.
        exchange: moves rows between the ranks of the group.

    Raises:
        UserError: a table is of a class of its own, which may look up otherwise.
    """
    spans: dict[str, Span] = {}
    regions: dict[str, Region] = {}
    modules = dict(model.named_modules())
    for name, weight in names.items():
        module = modules[name.rpartition(".")[0]]
        if type(module) not in _CUT:
            raise UserError(
                f"--parallel table=N: {name} belongs to a {type(module).__name__}, which may look rows up in its own "
                "way: use nn.Embedding or nn.EmbeddingBag, or leave table out"
            )
        shape = (int(module.num_embeddings), weight.shape[1])
        pieces = cut((0, shape[0]), group.size())
        span = spans[name] = pieces[group.rank()]
        regions[name] = Region(shape, ((span,), ((0, shape[1]),)))
        module.weight = nn.Parameter(_own_rows(weight, shape[0], span))
        module.__class__ = _CUT[type(module)]
        bounds = (0, *accumulate(stop - start for start, stop in pieces))
        module.table_cut = TableCut(name, bounds, exchange)
    return CutTables(group, spans, regions)


def can_fetch(module: nn.Module) -> bool:
    """Whether a table of this class, and no other, can look up rows that are elsewhere."""
    return type(module) in _CUT


def fetch_rows(model: nn.Module, names: Collection[str], exchange: RowTransport) -> None:
    """Let tables fetch all of their rows, in place: their weights have none, and get no gradients.

    Args:
        names: of their weights, which have no rows already.
        exchange: gives rows, and takes their gradients.
    """
    modules = dict(model.named_modules())
    for name in names:
        module = modules[name.rpartition(".")[0]]
        assert type(module) in _CUT and not len(module.weight)
        module.__class__ = _CUT[type(module)]
        module.table_cut = TableCut(name, (0, int(module.num_embeddings)), exchange)


def _own_rows(weight: nn.Parameter, rows: int, span: Span) -> Tensor:
    """Return this rank's rows: a copy, where the weight has all, so that the memory of the others is free again."""
    return weight.detach() if len(weight) < rows else weight.detach()[slice(*span)].clone()
