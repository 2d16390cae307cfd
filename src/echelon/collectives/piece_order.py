"""Gradients cut into pieces, and which piece travels next: what the coming forward pass needs first.

Jayarajan et al. 2019 (P3, arXiv:1905.03960) and Peng et al. 2019 (ByteScheduler): backward makes the gradients of the
last layers first, and the next forward pass needs those of the first layers first. In small pieces, what is needed
sooner overtakes what became ready before it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from echelon.collectives.wire import is_small
from echelon.core.shards import Span, cut

MOST_BYTES = 1024 * 1024
"""Bytes of a piece: 8 ms at 1 Gbit/s, for which a gradient that is needed sooner waits at most. Where more than two
replicas sum, another size would sum in another order and change last bits."""


@dataclass(frozen=True)
class GradientSlice:
    """Elements of a parameter's gradient, in the order in which it lies in memory."""

    parameter: int
    span: Span


@dataclass(frozen=True)
class GradientPiece:
    """What travels as one message.

    Attributes:
        group: what its bytes are counted as: `weights` or `small`.
        slices: of one parameter, or of several small ones that follow each other.
        numel: elements of all of them.
    """

    group: str
    slices: tuple[GradientSlice, ...]

    @property
    def numel(self) -> int:
        """Elements of all slices."""
        return sum(piece.span[1] - piece.span[0] for piece in self.slices)


@dataclass
class _Gathered:
    """Whole gradients that are to travel together."""

    slices: list[GradientSlice] = field(default_factory=list)
    n_bytes: int = 0


def cut_gradients(parameters: Sequence[Tensor]) -> list[GradientPiece]:
    """Cut the gradients of parameters (any shape), in the order of the model, into pieces of at most `MOST_BYTES`.

    Those of neighbours that are smaller travel together, if their types are the same; biases and the like in pieces of
    their own, for a neighbour of theirs may be large.
    """
    pieces: list[GradientPiece] = []
    gathered: dict[tuple[str, torch.dtype], _Gathered] = {}

    def close(key: tuple[str, torch.dtype]) -> None:
        """End the piece that is being gathered."""
        if key in gathered:
            pieces.append(GradientPiece(key[0], tuple(gathered.pop(key).slices)))

    for number, parameter in enumerate(parameters):
        span, key = (0, parameter.numel()), ("small" if is_small(parameter) else "weights", parameter.dtype)
        count = -(-parameter.nbytes // MOST_BYTES)
        if count > 1 or (key in gathered and gathered[key].n_bytes + parameter.nbytes > MOST_BYTES):
            close(key)
        if count > 1:
            pieces += [GradientPiece(key[0], (GradientSlice(number, span),)) for span in cut(span, count)]
        elif count:
            waiting = gathered.setdefault(key, _Gathered())
            waiting.slices.append(GradientSlice(number, span))
            waiting.n_bytes += parameter.nbytes
    for key in [*gathered]:
        close(key)
    return pieces


class PieceOrder:
    """Chooses, in one rank for all, which piece travels next; every piece once in each step.

    Of the pieces that are ready here the one that is needed first. Where none is, the one that is expected next, as
    they became ready in the last step: it is chosen before it is ready, so that no rank has to be told of it later. A
    rank where a chosen piece is not ready waits for it: each of them becomes ready in every step, in all ranks.
    """

    def __init__(self, count: int) -> None:
        """Expect `count` pieces from the last to the first."""
        self._all = frozenset(range(count))
        self._expected = [*reversed(range(count))]
        self._unchosen = set(self._all)
        self._ready: set[int] = set()
        self._came: list[int] = []
        self._step = 0  # whose pieces are being chosen, from 0

    def came(self, piece: int, step: int) -> None:
        """Hear that a piece is ready in this rank, in a step counted from 0."""
        self._came.append(piece)
        if len(self._came) == len(self._all):
            self._expected, self._came = self._came, []
        if step == self._step and piece in self._unchosen:
            self._ready.add(piece)

    def choose(self, needed: Sequence[int]) -> int:
        """Return the piece that travels after those that were chosen before.

        Args:
            needed: for each piece, its place in the forward pass.
        """
        ready = self._ready
        if ready:
            piece = min(ready, key=lambda number: (needed[number], number))
        else:
            piece = next(number for number in self._expected if number in self._unchosen)
        ready.discard(piece)
        self._unchosen.discard(piece)
        if not self._unchosen:
            self._unchosen, self._step = set(self._all), self._step + 1
        return piece
