"""The weighted mean of deltas over the replicas: large parameters through a codec, of sparse tables the rows that have
changed, the rest whole in one vector.
"""

from __future__ import annotations

import time
import warnings
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.collectives import codec_state
from echelon.collectives.buckets import Bucket, lay_out
from echelon.collectives.compressed_all_reduce import CodecShard
from echelon.collectives.reducer import Coding, PlainReducer, Reducer, is_finite, make_reducer
from echelon.collectives.route import Route
from echelon.collectives.row_reducer import RowReducer, Rows
from echelon.collectives.wire import WireCount, ring_bytes
from echelon.compression.base import Codec, working_dtype
from echelon.compression.transforms.error_feedback import ErrorFeedback
from echelon.core.shards import overlaps
from echelon.core.state_tree import StateTree, StateView
from echelon.sync.averaging.period import TIMES
from echelon.sync.averaging.values import Value
from echelon.torch_compat import uses_nccl

NO_TENSORS: Mapping[str, Tensor] = {}
NO_TABLE = torch.empty(0, 0, dtype=torch.float64)


@dataclass(frozen=True)
class DeltaTransport:
    """How deltas travel.

    Attributes:
        route: between which ranks, along which path.
        codec: of large parameters; None: they travel as they are.
        seed: of the codec's draws, the same on every rank.
        wire: where bytes are counted.
        stays: what a codec leaves out of a replica's delta stays in the replica's values.
        confirms: a mean counts once all ranks have it: what a linear codec leaves out is known with its last sum alone,
            so who lacks that could not keep its memory when others go on.
        row_codec: of changed rows of sparse tables (`Codec.takes_rows`), without memory; None: they travel as they are.
    """

    route: Route
    codec: Codec | None
    seed: int
    wire: WireCount
    stays: bool = False
    confirms: bool = False
    row_codec: Codec | None = None


@dataclass(frozen=True)
class Taking:
    """With what deltas go.

    Attributes:
        step: at which they were taken, on which what a codec draws for rows depends.
        tells: numbers for the other ranks: all ranks' come back under `TIMES`, [ranks, numbers].
    """

    step: int = 0
    tells: tuple[float, ...] = ()


NOTHING_TOLD = Taking()


class Exchange:
    """Averages the deltas of the same values again and again; keeps the codec's memories (error feedback).

    mean = sum_i n_i delta_i / sum_i n_i, where replica i has seen n_i samples. The whole vector goes first and carries
    n_i; what is encoded is delta_i n_i / sum n, so that what the codec left out weighs what it should.

    Attributes:
        took_s: seconds of the last mean whose replicas told each other something.
    """

    def __init__(self, link: DeltaTransport, values: Sequence[Value], label: str) -> None:
        """Prepare; `label` tells the exchanges of a model apart."""
        self._link, self._told, self.took_s = link, False, 0.0
        self._tables = {v.name for v in values if v.is_table}
        named = [(v.name, v.tensor) for v in values if v.encoded]
        self._buckets = [(bucket, self._reducer(bucket, label)) for bucket in lay_out(named).buckets]

    def _reducer(self, bucket: Bucket, label: str) -> Reducer:
        if self._link.codec is None:
            return PlainReducer(self._link.route, average=False)
        coding = Coding(self._link.codec, self._link.route, average=False, seed=self._link.seed)
        return make_reducer(coding, list(bucket.members), f"{label}.{bucket.number}", _vector(bucket))

    def mean(
        self,
        values: Sequence[Value],
        deltas: Mapping[str, Tensor],
        samples: int,
        with_unsent: bool = False,
        taking: Taking = NOTHING_TOLD,
    ) -> dict[str, Tensor] | None:
        """Return the mean of each delta, of its shape, the same bits on all ranks; None when no replica saw a sample.

        Args:
            with_unsent: what `unsent` returns is in the deltas, too; the codec adds it by itself.
            taking: with what the deltas go.

        Raises:
            PeerLostError, RuntimeError: a rank did not answer before the group's timeout.
        """
        began_s = self._now_s() if taking.tells else 0.0
        means = self._mean(values, deltas, samples, with_unsent, taking)
        self.took_s = self._now_s() - began_s if taking.tells else 0.0
        return means

    def _now_s(self) -> float:
        """Return the moment, after what is queued on a GPU."""
        if uses_nccl(self._link.route.group):
            torch.cuda.current_stream().synchronize()
        return time.perf_counter()

    def _mean(
        self, values: Sequence[Value], deltas: Mapping[str, Tensor], samples: int, with_unsent: bool, taking: Taking
    ) -> dict[str, Tensor] | None:
        whole = [v for v in values if not (v.encoded or v.is_table)]
        total, means = self._whole(whole, deltas, samples, taking.tells)
        if total == 0:
            return None
        for bucket, reducer in self._buckets:
            flat = _vector(bucket)
            for member in bucket.members:
                flat[slice(*member.span)] = deltas[member.name].reshape(-1)
            if with_unsent:
                for shard, error in _errors(reducer):
                    flat[slice(*shard.span)].sub_(error, alpha=self._link.route.group.size())
            flat *= samples / total
            self._link.wire.add("weights", reducer.reduce_(flat))
            if not is_finite(flat):
                self._tell([m.name for m in bucket.members if not is_finite(deltas[m.name])])
            means |= {m.name: flat[slice(*m.span)].view(m.shape) for m in bucket.members}
        means |= self._rows(values, deltas, samples / total, taking.step)
        if self._link.confirms:
            device = values[0].tensor.device
            self._link.wire.add("small", self._link.route.sum_(torch.zeros(1, device=device)))
        return means

    def _rows(
        self, values: Sequence[Value], deltas: Mapping[str, Tensor], share: float, step: int
    ) -> dict[str, Tensor]:
        """Return the sum of all ranks' deltas of tables times their shares; a moment's rows go through no codec."""
        link, found = self._link, dict[str, Tensor]()
        for kind, codec in (("parameter", link.row_codec), ("moment", None)):
            tables = [v for v in values if v.is_table and v.kind == kind]
            if not tables:
                continue
            draws = RowDraws(codec, link.seed, step)
            totals, sent = sum_of_rows(link.route, {v.name: deltas[v.name] for v in tables}, share, draws)
            link.wire.add(tables[0].group, sent)
            for name in (name for name, total in totals.items() if not is_finite(total)):
                self._tell([name] if not is_finite(deltas[name]) else [])
            found |= totals
        return found

    def leaves_unsent(self, value: Value) -> bool:
        """Whether what the codec leaves out of a value stays in the replica's."""
        return self._link.stays and value.encoded

    def unsent(self, value: Value) -> Tensor | None:
        """Return what the codec has left out of this rank's deltas of a value, of its shape, as if all replicas weighed
        the same; None where that does not stay in the replica's values.
        """
        if not self.leaves_unsent(value):
            return None
        total = torch.zeros(value.tensor.numel(), dtype=working_dtype(value.tensor.dtype), device=value.tensor.device)
        for bucket, reducer in self._buckets:
            for member in bucket.members:
                for shard, error in _errors(reducer) if member.name == value.name else ():
                    for both in overlaps([member.span], [shard.span]):
                        total[both.in_first] += error[both.in_second]
        return total.mul_(self._link.route.group.size()).view(value.tensor.shape)

    def had_by_all(self, values: Sequence[Value]) -> list[Value]:
        """Return the values without moments of parameters that have others, or none, in some replica.

        A replica may not have stepped a parameter yet: an expert that saw no tokens, a layer that was dropped.
        """
        moments: dict[int, list[str]] = {id(v.owner): [] for v in values if v.kind == "parameter"}
        for value in values:
            if value.kind == "moment":
                moments[id(value.owner)].append(value.name)
        digests = [zlib.crc32(" ".join(names).encode()) >> 1 for names in moments.values()]
        extremes = torch.tensor([digests, [-digest for digest in digests]], dtype=torch.int32)
        extremes = extremes.to(values[0].tensor.device)
        group = self._link.route.group
        dist.all_reduce(extremes, dist.ReduceOp.MIN, group=group)
        self._link.wire.add("moments", ring_bytes(extremes.nbytes, group.size(), extremes.is_cuda))
        alike = dict(zip(moments, (extremes[0] == -extremes[1]).tolist(), strict=True))
        return [v for v in values if v.kind != "moment" or alike[id(v.owner)]]

    def _tell(self, names: Sequence[str]) -> None:
        """Warn once, with the names of this rank's own parameters that are at fault."""
        if self._told:
            return
        self._told = True
        whose = f"what {', '.join(map(repr, names[:3]))} changed by is" if names else "what a replica changed by is"
        where = "here" if names else "on another rank"
        warnings.warn(
            f"{whose} not finite {where}: the mean over the replicas is not either, and training is lost on all of "
            "them from here; use a smaller learning rate or --clip",
            UserWarning,
            stacklevel=2,
        )

    def _whole(
        self, values: Sequence[Value], deltas: Mapping[str, Tensor], samples: int, tells: Sequence[float]
    ) -> tuple[float, dict[str, Tensor]]:
        """Average what travels whole; returns the number of samples of all replicas and the means."""
        route = self._link.route
        table = torch.zeros(route.size, len(tells), dtype=torch.float64)
        table[route.rank] = torch.tensor(tells, dtype=torch.float64)
        total, means, sent = weighted_sum(route, values, deltas, samples, table=table)
        elements = sum(v.tensor.numel() for v in values) + 1 + table.numel()
        self._link.wire.add("small", sent - sum(sent * v.tensor.numel() // elements for v in values))
        for value in values:
            self._link.wire.add(value.group, sent * value.tensor.numel() // elements)
        averages = {name: value / total for name, value in means.items()} if total else {}
        return total, averages | ({TIMES: table} if tells else {})

    def shards(self) -> list[CodecShard]:
        """Return the codec's states."""
        return [shard for _, reducer in self._buckets for shard in reducer.shards]

    def state_dict(self) -> StateTree:
        """Return the codec's memories under flat keys (not copied)."""
        flat: StateTree = {}
        for bucket, reducer in self._buckets:
            flat |= codec_state.state_dict(bucket, reducer.shards)
        return flat

    def load_state_dict(self, saved: StateView) -> None:
        """Take back what `state_dict` returned, or what `codec_state.merge` made of several ranks'.

        Raises:
            ValueError: it was saved by another codec, model or number of ranks.
        """
        if any(_parameter_of(key) in self._tables for key in saved):
            warnings.warn(
                "this checkpoint was written when tables were averaged whole: what the codec had not sent of the "
                "model's changes is left out, and its memory begins anew",
                UserWarning,
                stacklevel=2,
            )
            saved = {}
        for bucket, reducer in self._buckets:
            codec_state.load_state_dict(bucket, reducer.shards, saved)

    def load_common(self, saved: StateView) -> None:
        """Take over the codec's counters and factors of another rank; memories stay."""
        codec_state.load_common(self.shards(), saved)


@dataclass(frozen=True)
class RowDraws:
    """How values of rows are encoded.

    Attributes:
        codec: None: not at all.
        seed: of its draws, the same on every rank.
        step: on which they depend.
    """

    codec: Codec | None = None
    seed: int = 0
    step: int = 0


def sum_of_rows(
    route: Route, tensors: Mapping[str, Tensor], weight: float, draws: RowDraws
) -> tuple[dict[str, Tensor], int]:
    """Sum tensors `(N, D)` times weights over the ranks: of each rank travel the rows that are not zero, or the whole
    tensor where that is less.

    Returns:
        the sums by name, of the same shapes, and the bytes that this rank sent.

    Raises:
        PeerLostError: a rank did not answer before the group's timeout.
    """
    weighted = {}
    for name, tensor in tensors.items():
        rows = Rows.changed(tensor if weight else tensor[:0])
        weighted[name] = Rows(rows.indices, rows.values.mul_(weight))
    reducer = RowReducer(tensors, route.group, draws.codec, draws.seed)
    reducer.steps = draws.step
    totals = reducer.total(weighted, sum_whole=route.sum_)
    sums = {}
    for name, total in totals.items():
        is_whole = len(total.indices) == len(tensors[name])
        sums[name] = total.values if is_whole else torch.zeros_like(tensors[name])
        if not is_whole:
            sums[name][total.indices] = total.values
    return sums, reducer.wire.total


def weighted_sum(
    route: Route,
    values: Sequence[Value],
    tensors: Mapping[str, Tensor],
    weight: float,
    unweighted: Mapping[str, Tensor] = NO_TENSORS,
    table: Tensor = NO_TABLE,
) -> tuple[float, dict[str, Tensor], int]:
    """Sum weights, and tensors of any shape times weights, over the ranks in one message, in float64 if any is.

    Args:
        unweighted: by name, what is added to a tensor's sum as it is.
        table: float64 numbers, [ranks, any], of which this rank knows its row; it gets those of all ranks.

    Returns:
        the sum of the weights, the sums by name, and the bytes that this rank sent.
    """
    device = next((tensor.device for tensor in tensors.values()), torch.device("cpu"))
    exact = any(v.tensor.dtype == torch.float64 for v in values)
    dtype = torch.float64 if exact else torch.float32
    parts = [torch.ones(1, dtype=dtype, device=device)]
    parts += [tensors[v.name].reshape(-1).to(dtype) for v in values]
    parts.append(torch.zeros(table.numel(), dtype=dtype, device=device))
    flat = torch.cat(parts)
    flat = flat.mul_(weight) if weight else flat.zero_()  # a mask's -inf times nothing is nothing
    pieces = flat.split([p.numel() for p in parts])
    pieces[-1].copy_(table.view(-1))
    for value, piece in zip(values, pieces[1:-1], strict=True):
        if value.name in unweighted:
            piece += unweighted[value.name].reshape(-1)
    sent = route.sum_(flat)
    sums = {v.name: p.view(v.tensor.shape) for v, p in zip(values, pieces[1:-1], strict=True)}
    table.copy_(pieces[-1].view(table.shape))
    return float(pieces[0]), sums, sent


def _errors(reducer: Reducer) -> list[tuple[CodecShard, Tensor]]:
    """Return what a reducer's codec has left out, with the elements [n] that it is of."""
    memories = [(shard, shard.state.elementwise.get(ErrorFeedback.keeps)) for shard in reducer.shards]
    return [(shard, error) for shard, error in memories if error is not None]


def _parameter_of(key: str) -> str:
    """Return the parameter that a key of a codec's state is of: a rank's own (`KIND/NAME/START`) or merged ones'."""
    rest = key.partition("/")[2]
    return rest.rpartition("/")[0] or rest


def _vector(bucket: Bucket) -> Tensor:
    dtype = torch.float64 if bucket.dtype == torch.float64 else torch.float32
    return torch.empty(bucket.numel, dtype=dtype, device=bucket.device)
