"""Whole tensors on the first rank of a replica, and the pieces of them on all: put together, and given out again.

For what needs whole tensors outside of forward and backward, such as a parameter server's worker that is several ranks.
Everything travels through the processors' memory, in a group of its own: one flat tensor for each rank and way.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.parallel.base import Group
from echelon.parallel.local_shards import Box, Run

_CPU = torch.device("cpu")
_Slices = tuple[slice, ...]


@dataclass(frozen=True)
class Piece:
    """What a rank holds of a whole tensor of shape `of` (see `Box`), and whether it is the rank that gives it."""

    name: str
    of: tuple[int, ...]
    runs: tuple[tuple[Run, ...], ...]
    gives: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the piece."""
        return tuple(sum(stop - start for start, stop in runs) for runs in self.runs)

    @property
    def numel(self) -> int:
        """Elements of the piece."""
        return math.prod(self.shape)

    def blocks(self) -> Iterator[tuple[_Slices, _Slices]]:
        """Yield the parts without gaps: where each lies in the whole tensor, and where in the piece."""
        for chosen in product(*(_places(runs) for runs in self.runs)):
            yield tuple(whole for whole, _ in chosen), tuple(own for _, own in chosen)


def _places(runs: Sequence[Run]) -> list[tuple[slice, slice]]:
    """Pair each range of the whole with that of the piece.

    >>> _places([(2, 4), (6, 7)])
    [(slice(2, 4, None), slice(0, 2, None)), (slice(6, 7, None), slice(2, 3, None))]
    """
    places, at = [], 0
    for start, stop in runs:
        places.append((slice(start, stop), slice(at, at + stop - start)))
        at += stop - start
    return places


class ShardGather:
    """Tensors that the ranks of a group hold pieces of; the first rank has them whole.

    Attributes:
        shapes: of the whole tensors, by name; on the first rank only.
    """

    def __init__(self, boxes: Mapping[str, Box], dtype: torch.dtype, group: Group) -> None:
        """Tell the first rank which pieces this one holds; all ranks of the group call it together.

        Args:
            boxes: where this rank's pieces lie, by name.
            dtype: in which they travel.
            group: of ranks that can send tensors in the processor's memory.

        Raises:
            RuntimeError: nobody gives some elements (on the first rank).
        """
        self._dtype, self._group = dtype, group
        self._own = [Piece(name, box.shape, box.runs, box.writes) for name, box in boxes.items()]
        self._of_ranks = _told(self._own, group)
        self.shapes = _complete_shapes(self._of_ranks)

    @torch.no_grad()
    def gather(self, own: Mapping[str, Tensor | None], whole: Mapping[str, Tensor]) -> None:
        """Put the pieces of all ranks together; all call it together.

        Args:
            own: this rank's pieces by name, on any device; None: zeros.
            whole: on the first rank what is written to; others give none.
        """
        given = [piece for piece in self._own if piece.gives]
        flat = self._flat(given, own)
        if self._of_ranks:
            theirs = [[piece for piece in pieces if piece.gives] for pieces in self._of_ranks]
            flats = [flat, *(self._blank(pieces) for pieces in theirs[1:])]
            _wait([dist.irecv(each, group=self._group, group_src=r) for r, each in _filled(flats)])
            for pieces, each in zip(theirs, flats, strict=True):
                _put(pieces, each, whole)
        elif len(flat):
            dist.send(flat, group=self._group, group_dst=0)

    @torch.no_grad()
    def scatter(self, whole: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
        """Give each rank all the pieces that it holds; all call it together.

        Args:
            whole: the first rank's; others give none.
            own: this rank's pieces by name, on any device; they are written to.
        """
        flat = self._blank(self._own)
        if self._of_ranks:
            flats = [_cut(pieces, whole, self._blank(pieces)) for pieces in self._of_ranks]
            _wait([dist.isend(each, group=self._group, group_dst=r) for r, each in _filled(flats)])
            flat = flats[0]
        elif len(flat):
            dist.recv(flat, group=self._group, group_src=0)
        if self._own:
            flat = flat.to(own[self._own[0].name].device)  # at once
        for piece, part in zip(self._own, _parts(self._own, flat), strict=True):
            own[piece.name].copy_(part)

    def _blank(self, pieces: Sequence[Piece]) -> Tensor:
        return torch.empty(sum(piece.numel for piece in pieces), dtype=self._dtype)

    def _flat(self, pieces: Sequence[Piece], own: Mapping[str, Tensor | None]) -> Tensor:
        """Put a rank's pieces behind each other: joined where they are, and moved at once."""
        given = [own[piece.name] for piece in pieces]
        device = next((tensor.device for tensor in given if tensor is not None), _CPU)
        parts = [
            torch.zeros(piece.numel, dtype=self._dtype, device=device) if t is None else t.detach().reshape(-1)
            for piece, t in zip(pieces, given, strict=True)
        ]
        return torch.cat(parts).to(_CPU, self._dtype) if parts else self._blank([])


def _told(own: Sequence[Piece], group: Group) -> list[list[Piece]]:
    """Return the pieces of every rank on the first one, and nothing on the others."""
    text = json.dumps([[piece.name, piece.of, piece.runs, piece.gives] for piece in own]).encode()
    said = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    if dist.get_rank(group):
        dist.send(torch.tensor([len(said)]), group=group, group_dst=0)
        dist.send(said, group=group, group_dst=0)
        return []
    told = [list(own)]
    for rank in range(1, dist.get_world_size(group)):
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, group=group, group_src=rank)
        said = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(said, group=group, group_src=rank)
        told.append([_piece(*entry) for entry in json.loads(bytes(said.tolist()))])
    return told


def _piece(name: str, of: Sequence[int], runs: Sequence[Sequence[Sequence[int]]], gives: bool) -> Piece:
    return Piece(name, tuple(of), tuple(tuple((start, stop) for start, stop in of_dim) for of_dim in runs), gives)


def _complete_shapes(of_ranks: Sequence[Sequence[Piece]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the whole tensors, of which every element must be given by one rank."""
    shapes: dict[str, tuple[int, ...]] = {}
    given: dict[str, int] = {}
    for piece in (piece for pieces in of_ranks for piece in pieces):
        shapes[piece.name] = piece.of
        given[piece.name] = given.get(piece.name, 0) + piece.numel * piece.gives
    for name, shape in shapes.items():
        if given[name] != math.prod(shape):
            raise RuntimeError(f"{name}: ranks give {given[name]} elements of {math.prod(shape)}")
    return shapes


def _filled(flats: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """Yield the ranks, but the first, with their tensors where these are not empty."""
    return ((rank, flat) for rank, flat in enumerate(flats) if rank and len(flat))


def _parts(pieces: Sequence[Piece], flat: Tensor) -> Iterator[Tensor]:
    for piece, part in zip(pieces, flat.split([piece.numel for piece in pieces]), strict=True):
        yield part.view(piece.shape)


def _put(pieces: Sequence[Piece], flat: Tensor, whole: Mapping[str, Tensor]) -> None:
    for piece, part in zip(pieces, _parts(pieces, flat), strict=True):
        for in_whole, in_piece in piece.blocks():
            whole[piece.name][in_whole] = part[in_piece].to(whole[piece.name].dtype)


def _cut(pieces: Sequence[Piece], whole: Mapping[str, Tensor], flat: Tensor) -> Tensor:
    for piece, part in zip(pieces, _parts(pieces, flat), strict=True):
        for in_whole, in_piece in piece.blocks():
            part[in_piece] = whole[piece.name][in_whole].to(flat.dtype)
    return flat


def _wait(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        assert work is not None
        work.wait()
