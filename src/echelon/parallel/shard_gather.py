"""Whole tensors on the first rank of a replica, and the pieces of them on all: put together, and given out again.

For what needs whole tensors outside of forward and backward, such as a parameter server's worker that is several ranks.
Everything travels through the processors' memory, in a group of its own: one flat tensor for each rank and way.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.core.shards import Region, Slices
from echelon.parallel.base import Group
from echelon.parallel.local_shards import LocalShard

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class GatheredShard:
    """A rank's shard of a named tensor; the rank that writes it to checkpoints gives it to the first rank too."""

    name: str
    region: LocalShard

    def blocks(self) -> Iterator[tuple[Slices, Slices]]:
        """Yield the parts without gaps: slices of the whole tensor, and of the shard."""
        return Region.whole(self.region.shape).blocks(self.region)


class ShardGather:
    """Tensors that the ranks of a group hold pieces of; the first rank has them whole.

    Attributes:
        shapes: of the whole tensors, by name; on the first rank only.
    """

    def __init__(self, regions: Mapping[str, LocalShard], dtype: torch.dtype, group: Group) -> None:
        """Tell the first rank which pieces this one holds; all ranks of the group call it together.

        Args:
            regions: where this rank's shards lie, by name.
            dtype: in which they travel.
            group: of ranks that can send tensors in the processor's memory.

        Raises:
            RuntimeError: nobody gives some elements (on the first rank).
        """
        self._dtype, self._group = dtype, group
        self._own = [GatheredShard(name, region) for name, region in regions.items()]
        self._of_ranks = _told(self._own, group)
        self.shapes = _complete_shapes(self._of_ranks)

    @torch.no_grad()
    def gather(self, shards: Mapping[str, Tensor | None], tensors: Mapping[str, Tensor]) -> None:
        """Put the pieces of all ranks together; all call it together.

        Args:
            shards: this rank's pieces by name, any shape, on any device; None: zeros.
            tensors: on the first rank what is written to, of `shapes`; others give none.
        """
        given = [piece for piece in self._own if piece.region.writes]
        flat = self._flat(given, shards)
        if self._of_ranks:
            theirs = [[piece for piece in pieces if piece.region.writes] for pieces in self._of_ranks]
            flats = [flat, *(self._blank(pieces) for pieces in theirs[1:])]
            _wait([dist.irecv(each, group=self._group, group_src=r) for r, each in _filled(flats)])
            for pieces, each in zip(theirs, flats, strict=True):
                _put(pieces, each, tensors)
        elif len(flat):
            dist.send(flat, group=self._group, group_dst=0)

    def given(self, shards: Mapping[str, Tensor | None]) -> set[str]:
        """Return on the first rank the names of which some rank has a tensor, any shape; all call it together."""
        flags = torch.tensor([shards[piece.name] is not None for piece in self._own], dtype=torch.uint8)
        if not self._of_ranks:
            if len(flags):
                dist.send(flags, group=self._group, group_dst=0)
            return set()
        flats = [flags, *(torch.empty(len(pieces), dtype=torch.uint8) for pieces in self._of_ranks[1:])]
        _wait([dist.irecv(each, group=self._group, group_src=r) for r, each in _filled(flats)])
        return {
            piece.name
            for pieces, each in zip(self._of_ranks, flats, strict=True)
            for piece, flag in zip(pieces, each.tolist(), strict=True)
            if flag
        }

    @torch.no_grad()
    def scatter(self, tensors: Mapping[str, Tensor], shards: Mapping[str, Tensor]) -> None:
        """Give each rank all the pieces that it holds; all call it together.

        Args:
            tensors: the first rank's, of `shapes`; others give none.
            shards: this rank's pieces by name, any shape, on any device; they are written to.
        """
        flat = self._blank(self._own)
        if self._of_ranks:
            flats = [_cut(pieces, tensors, self._blank(pieces)) for pieces in self._of_ranks]
            _wait([dist.isend(each, group=self._group, group_dst=r) for r, each in _filled(flats)])
            flat = flats[0]
        elif len(flat):
            dist.recv(flat, group=self._group, group_src=0)
        if self._own:
            flat = flat.to(shards[self._own[0].name].device)  # at once
        for piece, part in zip(self._own, _parts(self._own, flat), strict=True):
            shards[piece.name].copy_(part)

    def _blank(self, pieces: Sequence[GatheredShard]) -> Tensor:
        return torch.empty(sum(piece.region.numel for piece in pieces), dtype=self._dtype)

    def _flat(self, pieces: Sequence[GatheredShard], shards: Mapping[str, Tensor | None]) -> Tensor:
        """Put a rank's pieces behind each other: joined where they are, and moved at once."""
        given = [shards[piece.name] for piece in pieces]
        device = next((tensor.device for tensor in given if tensor is not None), _CPU)
        parts = [
            torch.zeros(piece.region.numel, dtype=self._dtype, device=device) if t is None else t.detach().reshape(-1)
            for piece, t in zip(pieces, given, strict=True)
        ]
        return torch.cat(parts).to(_CPU, self._dtype) if parts else self._blank([])


def _told(shards: Sequence[GatheredShard], group: Group) -> list[list[GatheredShard]]:
    """Return the pieces of every rank on the first one, and nothing on the others."""
    text = json.dumps(
        [[piece.name, piece.region.shape, piece.region.spans, piece.region.writes] for piece in shards]
    ).encode()
    said = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    if dist.get_rank(group):
        dist.send(torch.tensor([len(said)]), group=group, group_dst=0)
        dist.send(said, group=group, group_dst=0)
        return []
    told = [list(shards)]
    for rank in range(1, dist.get_world_size(group)):
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, group=group, group_src=rank)
        said = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(said, group=group, group_src=rank)
        told.append([_shard(*entry) for entry in json.loads(bytes(said.tolist()))])
    return told


def _shard(name: str, shape: Sequence[int], spans: Sequence[Sequence[Sequence[int]]], gives: bool) -> GatheredShard:
    dims = tuple(tuple((start, stop) for start, stop in dim) for dim in spans)
    return GatheredShard(name, LocalShard(tuple(shape), dims, writes=gives))


def _complete_shapes(of_ranks: Sequence[Sequence[GatheredShard]]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the whole tensors, of which every element must be given by one rank."""
    shapes: dict[str, tuple[int, ...]] = {}
    given: dict[str, int] = {}
    for piece in (piece for pieces in of_ranks for piece in pieces):
        shapes[piece.name] = piece.region.shape
        given[piece.name] = given.get(piece.name, 0) + piece.region.numel * piece.region.writes
    for name, shape in shapes.items():
        if given[name] != math.prod(shape):
            raise RuntimeError(f"{name}: ranks give {given[name]} elements of {math.prod(shape)}")
    return shapes


def _filled(flats: Sequence[Tensor]) -> Iterator[tuple[int, Tensor]]:
    """Yield the ranks, but the first, with their tensors where these are not empty."""
    return ((rank, flat) for rank, flat in enumerate(flats) if rank and len(flat))


def _parts(pieces: Sequence[GatheredShard], flat: Tensor) -> Iterator[Tensor]:
    for piece, part in zip(pieces, flat.split([piece.region.numel for piece in pieces]), strict=True):
        yield part.view(piece.region.local_shape)


def _put(pieces: Sequence[GatheredShard], flat: Tensor, tensors: Mapping[str, Tensor]) -> None:
    for piece, part in zip(pieces, _parts(pieces, flat), strict=True):
        for in_whole, in_piece in piece.blocks():
            tensors[piece.name][in_whole] = part[in_piece].to(tensors[piece.name].dtype)


def _cut(pieces: Sequence[GatheredShard], tensors: Mapping[str, Tensor], flat: Tensor) -> Tensor:
    for piece, part in zip(pieces, _parts(pieces, flat), strict=True):
        for in_whole, in_piece in piece.blocks():
            part[in_piece] = tensors[piece.name][in_whole].to(flat.dtype)
    return flat


def _wait(works: Sequence[dist.Work | None]) -> None:
    for work in works:
        assert work is not None
        work.wait()
