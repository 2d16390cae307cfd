"""Reduces one vector over the ranks with a codec: which scheme serves which codec on which path."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from echelon.collectives.adaptation import Adaptation
from echelon.collectives.base import Path, Tiers
from echelon.collectives.compressed_all_reduce import CodecShard, CompressedAllReduce
from echelon.collectives.messages import Mailbox
from echelon.collectives.rounds import LinearAllReduce
from echelon.collectives.route import Route
from echelon.collectives.schedule import Ring, all_gather, reduce_scatter, ring_sum
from echelon.collectives.transfer import run_schedule
from echelon.compression.base import Codec, State
from echelon.compression.transforms import MomentumCorrection, momentum_of, weighted_sum
from echelon.core.errors import UserError
from echelon.core.shards import FlatTensor
from echelon.core.spec import spec_of


@dataclass(frozen=True)
class Coding:
    """What all vectors of a model share.

    Attributes:
        codec: what travels.
        route: along which path, between which ranks.
        average: divide the sum by the number of ranks.
        seed: of the codec's draws, the same on every rank.
    """

    codec: Codec
    route: Route
    average: bool
    seed: int = 0


class Reducer:
    """Sums or averages vectors of one length with a codec; keeps their states from step to step.

    Attributes:
        shards: the codec's states.
        adaptation: what chooses codecs, where they adapt.
    """

    shards: list[CodecShard]
    adaptation: Adaptation | None = None

    def reduce_(self, flat: Tensor) -> int:
        """Reduce a contiguous 1-D tensor in place, the same bits on every rank; returns the bytes sent by this rank.

        Where a rank's values are not finite, the result is not finite on any rank.

        Raises:
            PeerLostError: a rank did not answer before the group's timeout.
        """
        raise NotImplementedError


class PlainReducer(Reducer):
    """Without a codec."""

    def __init__(self, route: Route, average: bool) -> None:
        self._route, self._divisor = route, route.size if average else 1
        self.shards = []

    def reduce_(self, flat: Tensor) -> int:
        """Divide a 1-D tensor in place, then sum along the route."""
        if self._divisor != 1:
            flat.div_(self._divisor)
        return self._route.sum_(flat)


class MomentumReducer(Reducer):
    """For what travels whole beside a codec that applies the momentum: here, too, it is applied before the sum.

    The sum is linear, so that this is the optimizer's own momentum.
    """

    def __init__(
        self, plain: PlainReducer, momentum: MomentumCorrection, like: Tensor, state: State, holders: int
    ) -> None:
        self._plain, self._momentum, self._state = plain, momentum, state
        momentum.init_memory(state, like)
        self.shards = [CodecShard(state, (0, like.numel()), holders)]

    def reduce_(self, flat: Tensor) -> int:
        """Apply the momentum to a 1-D tensor in place, then reduce as without a codec."""
        flat.copy_(weighted_sum(self._momentum.before([(flat, 1.0)], self._state)))
        return self._plain.reduce_(flat)


class LinearReducer(Reducer):
    """A linear codec: its rounds are summed along the path itself."""

    def __init__(self, coding: Coding, pieces: list[FlatTensor], like: Tensor) -> None:
        route = coding.route
        self._sum = LinearAllReduce(coding.codec, pieces, like, (route.rank, route.size), coding.seed)
        self._route, self._average = route, coding.average
        self.shards = self._sum.shards

    def reduce_(self, flat: Tensor) -> int:
        """Sum the codec's rounds of a 1-D tensor along the route."""
        return self._sum.sum_(flat, self._route.sum_, self._average)


class CodedReducer(Reducer):
    """A non-linear codec between all ranks."""

    def __init__(self, coding: Coding, like: Tensor, name: str) -> None:
        route = coding.route
        mailbox = Mailbox(route.group, Ring(range(route.size), route.rank))
        self._sum = CompressedAllReduce(coding.codec, mailbox, like, name, coding.seed)
        self._divisor = route.size if coding.average else 1
        self.shards, self.adaptation = self._sum.shards, self._sum.adaptation

    def reduce_(self, flat: Tensor) -> int:
        """Exchange encoded chunks of a 1-D tensor, add them up, and exchange the encoded sums."""
        return self._sum.sum_(flat, self._divisor)


class TieredReducer(Reducer):
    """Plain sums inside groups; the codec works between the groups alone, where the links are slow."""

    def __init__(self, coding: Coding, tiers: Tiers, like: Tensor, name: str) -> None:
        route, self._tiers = coding.route, tiers
        self._group, self._divisor = route.group, route.size if coding.average else 1
        self.shards, self._coded, self._linear = [], None, None
        ring = self._tiers.between
        if ring is None:  # others of its group have all pieces
            return
        start, stop = self._tiers.pieces[self._tiers.inside.index]
        piece, name = like.view(-1)[start:stop], f"{name}.{self._tiers.inside.index}"
        if coding.codec.linear:
            whole = FlatTensor(name, (piece.numel(),), (0, piece.numel()))
            self._linear = LinearAllReduce(coding.codec, [whole], piece, (ring.index, len(ring.members)), coding.seed)
        else:
            self._coded = CompressedAllReduce(coding.codec, Mailbox(route.group, ring), piece, name, coding.seed)
            self.adaptation = self._coded.adaptation
        shards = (self._linear or self._coded).shards  # type: ignore[union-attr]
        self.shards = [replace(h, span=(h.span[0] + start, h.span[1] + start)) for h in shards]

    def reduce_(self, flat: Tensor) -> int:
        """Scatter sums of a 1-D tensor in the group, reduce this rank's piece between groups with the codec, gather."""
        inside, pieces = self._tiers.inside, self._tiers.pieces
        sent = run_schedule(flat, reduce_scatter(inside, pieces, 0), self._group)
        if self._tiers.between is not None:
            sent += self._reduce_between(flat[slice(*pieces[inside.index])], self._tiers.between)
        return sent + run_schedule(flat, all_gather(inside, pieces, self._tiers.spread_round), self._group)

    def _reduce_between(self, piece: Tensor, ring: Ring) -> int:
        if self._coded is not None:
            return self._coded.sum_(piece, self._divisor)
        assert self._linear is not None
        if self._divisor != 1:
            piece.div_(self._divisor)
        return self._linear.sum_(piece, lambda message: self._sum_between(message, ring), average=False)

    def _sum_between(self, message: Tensor, ring: Ring) -> int:
        return run_schedule(message, ring_sum(ring, (0, message.numel()), 0), self._group)


def check_combination(codec: Codec, path: Path, size: int) -> None:
    """Refuse a codec that cannot travel along a path between `size` ranks.

    Raises:
        UserError: names the nearest combination that works.
    """
    tiers = path.tiers(0, size, 0)
    if not codec.linear and not path.by_backend and tiers is None:
        raise UserError(
            f"collective {path.name} sums at every hop, and what compression {codec.name} sends cannot be summed: "
            "use collective backend or hierarchical(group=N), or a compression that can (bf16, fp16, powersgd, randomk)"
        )
    between = tiers.between if tiers is not None and not (codec.shaped and codec.linear) else None
    if between is not None and len(between.members) == 1 and size > 1:
        raise UserError(
            f"collective {spec_of(path.name, path)} makes one group of {size} replicas, and compression {codec.name} "
            "works between groups: use a smaller group, or collective backend"
        )


def make_small_reducer(coding: Coding, name: str, like: Tensor) -> Reducer:
    """Build what reduces 1-D tensors of parameters that travel whole beside those that the codec encodes."""
    plain, codec = PlainReducer(coding.route, coding.average), coding.codec
    if (momentum := momentum_of(codec)) is None:
        return plain
    return MomentumReducer(plain, momentum, like, State(name), coding.route.size)


def make_reducer(coding: Coding, pieces: list[FlatTensor], name: str, like: Tensor) -> Reducer:
    """Build what reduces vectors like `like` (contiguous, 1-D): pieces are the parameters it is made of.

    Raises:
        UserError: the codec cannot travel along the path.
    """
    check_combination(coding.codec, coding.route.path, coding.route.size)
    codec, route = coding.codec, coding.route
    if codec.shaped and codec.linear:
        return LinearReducer(coding, pieces, like)
    tiers = route.path.tiers(route.rank, route.size, like.numel()) if route.size > 1 else None
    if tiers is not None:
        return TieredReducer(coding, tiers, like, name)
    if codec.linear:
        return LinearReducer(coding, [FlatTensor(name, (like.numel(),), (0, like.numel()))], like)
    return CodedReducer(coding, like, name)


def is_finite(flat: Tensor) -> bool:
    """Whether all elements, any shape, are finite: one pass in the usual case, exact in others (waits for a GPU)."""
    return bool(torch.isfinite(flat.sum())) or bool(torch.isfinite(flat).all())
