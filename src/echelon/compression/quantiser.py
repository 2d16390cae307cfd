"""What the codecs with blocks, levels and stochastic rounding share: int8, qsgd, ternary."""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import Tensor

from echelon.compression.base import Codec, Meta, Payload, State, flat32
from echelon.compression.blocks import Grid, block_count, dequantise, quantise
from echelon.compression.chunks import Decoder, accumulate, write
from echelon.compression.wire import Layout


class Quantiser(Codec):
    """A codec that rounds to a `Grid` and packs the codes; a subclass says which grid and how codes are packed."""

    @property
    @abstractmethod
    def grid(self) -> Grid:
        """Levels, block and clipping."""

    @abstractmethod
    def packed_size(self, numel: int) -> int:
        """Bytes of so many packed codes."""

    @abstractmethod
    def pack(self, codes: Tensor) -> Tensor:
        """Pack uint8 codes [n] into uint8 [packed_size(n)]."""

    @abstractmethod
    def unpack(self, packed: Tensor, n: int) -> Tensor:
        """Undo `pack`."""

    def layout(self, numel: int) -> Layout:
        """Return one float32 scale per block, and the packed codes."""
        return ((torch.float32, block_count(numel, self.grid.block)), (torch.uint8, self.packed_size(numel)))

    def compress(self, tensor: Tensor, state: State) -> Payload:
        """Round each element stochastically to a level of its block and pack the codes."""
        scales, codes = quantise(flat32(tensor), self.grid, state)
        state.numbers["step"] += 1
        return self.payload((scales, self.pack(codes)), Meta.of(tensor))

    def extract(self, payload: Payload, out: Tensor | None = None) -> Tensor:
        """Multiply the codes by the scales of their blocks."""
        return write(self._decoder(payload), payload, out, payload.tensors[0].device)

    def add_to(self, target: Tensor, payload: Payload, alpha: float = 1.0) -> None:
        """Add `alpha` times the decoded tensor to `target`, block by block, in place."""
        accumulate(self._decoder(payload), target, alpha)

    def _decoder(self, payload: Payload) -> Decoder:
        steps, packed = payload.tensors
        codes = self.unpack(packed, payload.meta.numel)
        return lambda into: dequantise(steps, codes, self.grid, into)

    def planes(self, payload: Payload) -> tuple[Tensor, ...]:
        """Return the bytes of the scales, and the codes unpacked: one symbol per element."""
        scales, packed = payload.tensors
        return scales.view(torch.uint8), self.unpack(packed, payload.meta.numel)

    def from_planes(self, planes: tuple[Tensor, ...], meta: Meta) -> Payload:
        """Build the payload from scales and codes."""
        scales, codes = planes
        return self.payload((scales.view(torch.float32), self.pack(codes)), meta)
