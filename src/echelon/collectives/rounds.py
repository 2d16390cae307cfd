"""The compressed all-reduce for linear codecs: what they send is summed directly, along any path."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from echelon.collectives.compressed_all_reduce import CodecShard
from echelon.compression.base import Codec, FusedRounds, NonFiniteError
from echelon.core.shards import FlatTensor
from echelon.torch_compat import foreach_copy_

SumInPlace = Callable[[Tensor], int]
"""Sums a contiguous 1-D tensor over the ranks, in place, and returns the bytes sent."""


class LinearAllReduce:
    """Sums one vector over `size` ranks by a codec's own rounds of reduction; keeps that vector's states.

    Attributes:
        shards: the states, for snapshots and checkpoints.
    """

    def __init__(
        self, codec: Codec, pieces: Sequence[FlatTensor], like: Tensor, place: tuple[int, int], seed: int
    ) -> None:
        """Prepare; `place` is this rank's number among those that sum, and how many these are."""
        rank, self._size = place
        self._codec = codec
        self._pieces = [p for p in pieces if p.span[0] < p.span[1]]
        flat = like.view(-1)
        views = [flat[slice(*p.span)].view(p.shape) for p in self._pieces]
        self._states = [codec.init_state(p.name, v, seed, rank) for p, v in zip(self._pieces, views, strict=True)]
        self.shards = [CodecShard(s, p.span, self._size) for s, p in zip(self._states, self._pieces, strict=True)]

    def sum_(self, flat: Tensor, sum_in_place: SumInPlace, average: bool) -> int:
        """Sum or average a contiguous 1-D tensor in place; returns the bytes sent.

        Where any rank's values are not finite the result is NaN everywhere, on every rank.

        Raises:
            PeerLostError: a rank did not answer before the group's timeout.
        """
        if not self._pieces:
            return 0
        rounds, piece, usable = self._begin(flat)
        mean, sent, usable = self._first_mean(piece, sum_in_place, usable)
        if not usable:
            rounds.close()
            flat.fill_(torch.nan)
            return sent
        while True:
            try:
                piece = rounds.send(mean)
            except StopIteration as stop:
                self._write(flat, stop.value, average)
                return sent
            mean, more = self._mean(piece, sum_in_place)
            sent += more

    def _begin(self, flat: Tensor) -> tuple[FusedRounds, Tensor, bool]:
        """Start the rounds; a rank that cannot take part sends zeros, and the word that the sum is void."""
        step = max(state.step for state in self._states)
        try:
            rounds = self._rounds(flat)
            return rounds, next(rounds), True
        except NonFiniteError:
            for state in self._states:  # ranks count alike
                state.numbers["step"] = step
            rounds = self._rounds(torch.zeros_like(flat))
            return rounds, next(rounds), False

    def _rounds(self, flat: Tensor) -> FusedRounds:
        views = [flat[slice(*p.span)].view(p.shape) for p in self._pieces]
        codec = self._codec.at(max(state.step for state in self._states))
        return codec.reduce_parts(views, self._states)

    def _first_mean(self, piece: Tensor, sum_in_place: SumInPlace, usable: bool) -> tuple[Tensor, int, bool]:
        """Return the mean of the first piece, the bytes sent, and whether it is usable on all ranks."""
        word = torch.full_like(piece[:1], 0.0 if usable else 1.0)
        message, sent = self._mean(torch.cat([piece, word]), sum_in_place)
        return message[:-1], sent, not bool(message[-1] != 0)

    def _mean(self, piece: Tensor, sum_in_place: SumInPlace) -> tuple[Tensor, int]:
        """Return the mean of a piece over the ranks and the bytes sent."""
        if piece.dtype.itemsize < 4:  # the sum of short floats could overflow
            message = piece / self._size
            return message, sum_in_place(message)
        message = piece.clone()
        sent = sum_in_place(message)
        return message.div_(self._size), sent

    def _write(self, flat: Tensor, means: Sequence[Tensor], average: bool) -> None:
        foreach_copy_([flat[slice(*p.span)].view(p.shape) for p in self._pieces], list(means))
        if not average and not self._codec.direction:
            flat.mul_(self._size)
