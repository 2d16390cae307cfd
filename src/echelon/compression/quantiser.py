"""What the codecs with blocks, levels and stochastic rounding share: int8, qsgd, ternary."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from echelon.compression.base import Meta, Payload, State, flat32
from echelon.compression.blocks import (
    Grid,
    block_count,
    dequantise,
    dequantise_parts,
    quantise,
    quantise_packed,
    quantise_parts,
    rounding,
)
from echelon.compression.chunks import DecodedChunks, DenseCodec, accumulate, check_fits, write
from echelon.compression.native import Packing, kernels_for
from echelon.compression.wire import Layout


class Quantiser(DenseCodec):
    """A codec that rounds to a `Grid` and packs the codes; a subclass says which grid and how codes are packed."""

    @property
    @abstractmethod
    def grid(self) -> Grid:
        """Levels, block and clipping."""

    @abstractmethod
    def packed_size(self, numel: int) -> int:
        """Bytes of so many packed codes."""

    @abstractmethod
    def packing(self, numel: int) -> Packing:
        """Return how `pack` lays out so many codes."""

    @abstractmethod
    def pack(self, codes: Tensor) -> Tensor:
        """Pack uint8 codes [n] into uint8 [packed_size(n)]."""

    @abstractmethod
    def unpack(self, packed: Tensor, n: int) -> Tensor:
        """Undo `pack`; returns uint8 codes [n]."""

    def layout(self, numel: int) -> Layout:
        """Return one float32 scale per block, and the packed codes."""
        return ((torch.float32, block_count(numel, self.grid.block)), (torch.uint8, self.packed_size(numel)))

    def compress(self, tensor: Tensor, state: State) -> Payload:
        """Round each element, any shape, stochastically to a level of its block and pack the codes."""
        x, numel = flat32(tensor), tensor.numel()
        if (kernels := kernels_for(x)) is not None:
            made = quantise_packed(kernels, x, self.grid, self.packing(numel), self.packed_size(numel), state)
        else:
            scales, codes = quantise(x, self.grid, state)
            made = scales, self.pack(codes)
        state.numbers["step"] += 1
        return self.payload(made, Meta.of(tensor))

    def extract(self, payload: Payload, out: Tensor | None = None) -> Tensor:
        """Multiply the codes by the scales of their blocks; of the payload's shape."""
        return write(lambda into: self._decoded(payload, into), payload, out, payload.tensors[0].device)

    def add_to(self, target: Tensor, payload: Payload, alpha: float = 1.0) -> None:
        """Add `alpha` times the decoded tensor to `target`, any shape, block by block, in place."""
        check_fits(payload, target)
        steps, packed = payload.tensors
        if (kernels := kernels_for(steps, target)) is not None and abs(alpha) == 1:
            kernels.dequantise(steps, packed, rounding(self.grid), self.packing(target.numel()), target, alpha)
        else:
            accumulate(lambda into: self._decoded(payload, into), target, alpha)

    def compress_together(self, tensors: Sequence[Tensor], states: Sequence[State]) -> list[Payload]:
        """Do what `compress` does to each, any shape, in one go."""
        made = quantise_parts([flat32(tensor) for tensor in tensors], self.grid, states)
        for state in states:
            state.numbers["step"] += 1
        pairs = zip(made, tensors, strict=True)
        return [self.payload((scales, self.pack(codes)), Meta.of(tensor)) for (scales, codes), tensor in pairs]

    def decoded_together(self, payloads: Sequence[Payload]) -> list[Tensor]:
        """Return the float32 values [numel] of each."""
        pairs = [(steps, self.unpack(packed, p.meta.numel)) for p in payloads for steps, packed in [p.tensors]]
        return dequantise_parts(pairs, self.grid)

    def _decoded(self, payload: Payload, into: Tensor | None) -> DecodedChunks:
        (steps, packed), numel = payload.tensors, payload.meta.numel
        if into is None or (kernels := kernels_for(steps, into)) is None:
            return dequantise(steps, self.unpack(packed, numel), self.grid, into)
        kernels.dequantise(steps, packed, rounding(self.grid), self.packing(numel), into)
        return [(0, numel, into)]

    def planes(self, payload: Payload) -> tuple[Tensor, ...]:
        """Return the bytes of the scales, and the codes unpacked: one symbol per element."""
        scales, packed = payload.tensors
        return scales.view(torch.uint8), self.unpack(packed, payload.meta.numel)

    def from_planes(self, planes: tuple[Tensor, ...], meta: Meta) -> Payload:
        """Build the payload from the bytes of scales, uint8 [4 * blocks], and codes, uint8 [n]."""
        scales, codes = planes
        return self.payload((scales.view(torch.float32), self.pack(codes)), meta)
