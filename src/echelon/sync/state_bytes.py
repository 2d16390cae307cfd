"""Memory that a strategy and its codec keep on a rank from step to step, reckoned before anything runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from echelon.collectives.buckets import lay_out
from echelon.collectives.wire import is_small
from echelon.compression import Compression
from echelon.compression.base import Codec
from echelon.compression.state import working_dtype
from echelon.sync.averaging.plan import AveragingPlan


@dataclass(frozen=True)
class Piece:
    """What a rank holds of the model.

    Attributes:
        parameters: the trainable ones, also without memory (device `meta`).
        optimizer: bytes of the optimizer's state.
        ranks: that hold the same piece in other replicas, with this one.
    """

    parameters: Sequence[Tensor]
    optimizer: int
    ranks: int


@dataclass(frozen=True)
class StateBytes:
    """Bytes on one rank.

    Attributes:
        between: there all the time.
        agreeing: more than that for a moment, in which there are no activations, and no gradients but those in it.
        saved: of `between`, what every checkpoint holds; means on their way come on top.
    """

    between: int = 0
    agreeing: int = 0
    saved: int = 0


def whole(parameters: Sequence[Tensor]) -> int:
    """Return the bytes of a copy of each parameter, any shape, in the type that is computed with."""
    return sum(p.numel() * working_dtype(p.dtype).itemsize for p in parameters)


def states(compression: Compression, piece: Piece) -> int:
    """Return the bytes of a codec's states in an all-reduce: error feedback, momentum, factors.

    Small parameters are not encoded, but have the codec's momentum. Each rank encodes the sum of its chunk again,
    unless sums travel as they are.
    """
    if not compression.encodes or piece.ranks == 1:
        return 0
    codec = compression.build()
    large = [p for p in piece.parameters if not is_small(p)]
    own = sum(_state(codec, p) for p in large)
    if codec.absorbs_momentum:
        own += whole([p for p in piece.parameters if is_small(p)])
    return own if codec.linear else own + sum(_state(codec.relay(), p) for p in large) // piece.ranks


def pushed(compression: Compression, parameters: Sequence[Tensor]) -> int:
    """Return the bytes of a codec's states at the sender of all gradients, of the parameters' shapes."""
    return sum(_state(compression.build(), p) for p in parameters) if compression.encodes else 0


def _state(codec: Codec, like: Tensor) -> int:
    state = codec.init_state("", like if codec.shaped else like.reshape(-1))
    return sum(tensor.nbytes for tensor in (*state.elementwise.values(), *state.factors.values()))


def under_way(compression: Compression, vectors: Sequence[int]) -> int:
    """Return the bytes of a message and of what comes back, for the longest of some vectors, in elements."""
    if not compression.encodes or not vectors:
        return 0
    codec, longest = compression.build().at(0), max(vectors)
    bits = codec.bits_per_element(longest)
    return 0 if math.isnan(bits) else round(2 * longest * bits / 8)


def by_hook(compression: Compression, piece: Piece) -> StateBytes:
    """Reckon gradients that are reduced through a codec: vectors that they are copied into, states, copies, a message.

    States are copied before a step, which is undone when a gradient is not finite.
    """
    if not compression.encodes or piece.ranks == 1:
        return StateBytes()
    own = states(compression, piece)
    named = [(str(number), p) for number, p in enumerate(piece.parameters)]
    buckets = [bucket.numel for bucket in lay_out(reversed(named)).buckets if bucket.group == "weights"]
    message = under_way(compression, buckets)
    return StateBytes(sum(p.nbytes for p in piece.parameters) + 2 * own + message, saved=own)


def by_averaging(plan: AveragingPlan, compression: Compression, piece: Piece, momenta: bool = False) -> StateBytes:
    """Reckon values that are averaged now and then: what was agreed on last, and what the codec remembers.

    Deltas and the vectors in which they are reduced are there for a moment; with `overlap` while steps go on.

    Args:
        momenta: the strategy has an outer momentum.
    """
    size = whole(piece.parameters)
    agreed = size + (piece.optimizer if plan.optimizer_state == "average" else 0)
    own = agreed + momenta * size + states(compression, piece)
    between, agreeing = (own + 2 * agreed, 0) if plan.overlap else (own, 2 * agreed)
    first = by_hook(compression, piece) if plan.start else StateBytes()
    elements = sum(p.numel() for p in piece.parameters)
    message = under_way(compression, [elements]) // 2 if piece.ranks > 1 else 0  # of all at once, and then what is back
    return StateBytes(between + first.between, agreeing + message, own + first.saved)
