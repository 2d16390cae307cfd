"""sign: one bit for each element, its sign, with one scale per block.

Helps: Links some 20 times too slow, above all with --sync local. With allreduce use nesterov=true.
Costs: accuracy with allreduce; memory for error feedback (`--dry-run` counts it).
Needs: SGD with momentum, which is applied in the workers, before encoding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from echelon.compression.base import (
    Codec,
    Meta,
    Payload,
    State,
    Terms,
    empty,
    flat32,
    largest_magnitude,
    moved,
    refuse_nonfinite,
    refuse_nonfinite_together,
)
from echelon.compression.bits import pack_bits, packed_size, unpack_bits
from echelon.compression.blocks import block_count, rows
from echelon.compression.chunks import (
    CHUNK,
    DecodedChunks,
    DenseCodec,
    accumulate,
    as_rows,
    check_fits,
    spans,
    tiles,
    write,
)
from echelon.compression.eased import CorrectsMomentum, Eased
from echelon.compression.native import kernels_for
from echelon.compression.wire import Layout
from echelon.core.bounds import Bounds, check_bounds

# Sums of a block of such elements and such a memory are finite: nothing is refused once the memory is changed.
_LARGE = 2.0**109
_SMALLER_BLOCKS = 3  # `records.kinds.VERSION`
_FORMER_BLOCK = 4096  # the default of earlier versions, which runs with votes may name


@dataclass(frozen=True)
class Sign(CorrectsMomentum, Eased, DenseCodec):
    """Send each element's sign, and the mean of |p| for each block; error feedback sends later what is left out.

    With p = gradient + kept error, a block of d elements is sent as delta = (|p|_1 / d) sign(p), and p - delta is kept.
    Momentum must be applied in the worker, before encoding. After decoding, together with error feedback, it would
    amplify the error until training collapses. 1 + 32 / block bits per element. Biased.

    `vote=true` is a majority vote, without scales and error feedback. Workers send sign(m), where m is their momentum
    average. Every element of the result is +magnitude or -magnitude, as most workers say (a tie takes turns by element
    and step). The result is a direction, so it is not divided by the number of workers.

    Attributes:
        block: elements that share a scale. The fewer, the closer messages are to what they stand for, and the more
            scales travel: with averages every 4 steps of a short run 0.36 points of accuracy were lost with blocks of
            4096, 0.27 with 256, 0.13 with 64.
        vote: take a majority vote.
        momentum: applied in the worker, before encoding; left out: the optimizer's momentum, which Echelon moves here.
        nesterov: Nesterov momentum in the worker (see topk), which makes up for gradients that error feedback delays
            (Zheng et al. 2019, arXiv:1905.10936). Left out: as the optimizer has it.
        magnitude: size of every element of a vote's result, in gradient units (times the learning rate: the step).
        warmup_steps: how many first steps send int8 instead (a vote has none); 0: none; left out: 5% of the run's
            steps, and none of averages.
        finish_steps: how many last steps send int8 instead; 0: none; left out: 2% of the run's steps.

    Papers: Seide et al. 2014 (1-bit SGD); Karimireddy et al. 2019, arXiv:1901.09847 (EF-signSGD); Bernstein et al.
    2018, arXiv:1802.04434 (majority vote, Signum).
    """

    name: ClassVar[str] = "sign"
    examples: ClassVar[tuple[str, ...]] = (
        "sign",
        "sign(block=64)",
        "sign(momentum=0.9)",
        "sign(vote=true, momentum=0.9)",
        "sign+huffman",
    )
    momentum_inside: ClassVar[bool] = True
    block: Annotated[int, Bounds(least=8, most=131_072, step=8)] = 256
    vote: bool = False
    momentum: Annotated[float | None, Bounds(least=0, below=1)] = None
    magnitude: Annotated[float, Bounds(above=0, hint="such as 0.02")] = 0.02
    nesterov: bool | None = None
    warmup_steps: Annotated[int | None, Bounds(least=0)] = None
    finish_steps: Annotated[int | None, Bounds(least=0)] = None

    def __post_init__(self) -> None:
        check_bounds(self)
        if not self.vote and self.magnitude != Sign.magnitude:
            raise ValueError("magnitude is that of a vote's result: without vote=true each block has its own scale")
        if self.vote and self.block not in (Sign.block, _FORMER_BLOCK):
            raise ValueError("a vote has no blocks: leave block out")

    def changed_since(self, version: int) -> str:
        """Say, of blocks that may be the default, that earlier versions had another one."""
        if version >= _SMALLER_BLOCKS or self.vote or self.block != Sign.block:
            return ""
        return (
            f"sign has blocks of {self.block} elements where none are written ({_FORMER_BLOCK} before), and sends more "
            "scales"
        )

    @property
    def biased(self) -> bool:
        """True without a vote: a block keeps its mean magnitude only."""
        return not self.vote

    @property
    def direction(self) -> bool:
        """True for a vote."""
        return self.vote

    def relay(self) -> Codec:
        """Return the codec without momentum; of a vote the one that sends its outcome."""
        plain = {**vars(self), "momentum": 0.0}
        return Majority(**plain) if self.vote else Sign(**plain)

    def layout(self, numel: int) -> Layout:
        """Return one float32 scale per block, but for a vote, and one bit per element."""
        signs: Layout = ((torch.uint8, packed_size(numel)),)
        return signs if self.vote else ((torch.float32, block_count(numel, self.block)), *signs)

    def compress(self, tensor: Tensor, state: State) -> Payload:
        """Encode the sign of each element, any shape, and each block's mean magnitude."""
        x = flat32(tensor)
        packed = empty(packed_size(x.numel()), torch.uint8, x.device)
        scales = empty(block_count(x.numel(), self.block), torch.float32, x.device)
        if (kernels := kernels_for(x)) is not None and not self.vote:
            kernels.encode_signs(x, self.block, scales, packed)
        elif x.device.type == "cpu":
            self._encode_on_cpu(x, scales, packed, state.step)
        else:
            for start, end in spans(x.numel(), self.block, x.device):
                first, last = start // self.block, start // self.block + block_count(end - start, self.block)
                scales[first:last] = rows(x[start:end], self.block).abs().mean(dim=1)
            packed.copy_(pack_bits(_voted(x, state.step) if self.vote else x >= 0))
        refuse_nonfinite(scales.max() if x.numel() else 0.0, state)
        state.numbers["step"] += 1
        return self.payload((packed,) if self.vote else (scales, packed), Meta.of(tensor))

    def compress_with_memory(self, terms: Terms, memory: Tensor, shape: Sequence[int], state: State) -> Payload:
        """Do what a codec does with a memory [numel], block by block where loops are compiled."""
        kernels = kernels_for(memory, *(term for term, _ in terms))
        if kernels is None or self.vote:
            return super().compress_with_memory(terms, memory, shape, state)
        joins = terms[-1][1] == 1  # the last term is added block by block, too
        others, last = (terms[:-1], terms[-1][0]) if joins else (terms, None)
        for term, weight in others:
            memory.add_(term, alpha=weight)
        if not all(largest_magnitude(values) <= _LARGE for values in (memory, *([] if last is None else [last]))):
            return super().compress_with_memory([] if last is None else [(last, 1.0)], memory, shape, state)
        scales = empty(block_count(memory.numel(), self.block), torch.float32, memory.device)
        packed = empty(packed_size(memory.numel()), torch.uint8, memory.device)
        kernels.encode_signs_with_memory(last, memory, self.block, scales, packed)
        state.numbers["step"] += 1
        return self.payload((scales, packed), Meta(tuple(shape)))

    def compress_together(self, tensors: Sequence[Tensor], states: Sequence[State]) -> list[Payload]:
        """Do what `compress` does to each of several tensors, of any shape, in few launches."""
        flats = [flat32(tensor) for tensor in tensors]
        refuse_nonfinite_together(flats, states)
        sizes = [x.numel() for x in flats]
        width = -(-max(sizes) // self.block) * self.block
        filled = as_rows(flats, width)
        if self.vote:
            turns = moved(np.array([[state.step] for state in states]), filled.device)
            turn = ((torch.arange(width, device=filled.device) + turns) & 1).bool()
            packed = pack_bits(((filled > 0) | ((filled == 0) & turn)).view(-1))
        else:
            packed = pack_bits(filled.view(-1) >= 0)
        means = filled.abs_().view(len(flats), -1, self.block).mean(dim=2)
        for i, size in enumerate(sizes):
            if rest := size % self.block:
                means[i, size // self.block] = filled[i, size - rest : size].mean()
        for state in states:
            state.numbers["step"] += 1
        return [
            self.payload((signs,) if self.vote else (scales, signs), Meta.of(tensor))
            for tensor, scales, signs in zip(
                tensors, _first(means, [block_count(size, self.block) for size in sizes]),
                _first(packed.view(len(flats), -1), [packed_size(size) for size in sizes]), strict=True,
            )
        ]  # fmt: skip

    def decoded_together(self, payloads: Sequence[Payload]) -> list[Tensor]:
        """Return the float32 values [numel] of each."""
        sizes = [payload.meta.numel for payload in payloads]
        width = -(-max(sizes) // self.block) * self.block
        packed = as_rows([payload.tensors[-1] for payload in payloads], width // 8)
        values = unpack_bits(packed.view(-1), len(payloads) * width).float().mul_(2).sub_(1)
        if self.vote:
            values.mul_(self._unit())
        else:
            scales = as_rows([payload.tensors[0] for payload in payloads], width // self.block)
            values.view(-1, self.block).mul_(scales.view(-1, 1))
        return _first(values.view(len(payloads), width), sizes)

    def _encode_on_cpu(self, x: Tensor, scales: Tensor, packed: Tensor, step: int) -> None:
        """Write mean |x| of each block, where NaN and infinity carry over, and the signs."""
        out = packed.numpy()
        for part in tiles(x.numel(), self.block):
            values, means = part.cut(x), part.per_block(scales)
            scratch = np.empty((part.step, part.block), np.float32)
            large = np.empty((part.step, part.block), np.bool_)
            zero = np.empty_like(large)
            for row in range(0, part.rows, part.step):
                piece = values[row : row + part.step]
                np.sum(np.abs(piece, out=scratch[: len(piece)]), axis=1, out=means[row : row + part.step])
                at = part.start + row * part.block
                if self.vote:
                    positive = np.greater(piece, 0, out=large[: len(piece)])
                    first = (at + step) & 1
                    turns = _turns()[first : first + piece.size].reshape(piece.shape)
                    positive |= np.logical_and(
                        np.equal(piece, 0, out=zero[: len(piece)]), turns, out=zero[: len(piece)]
                    )
                else:
                    positive = np.greater_equal(piece, 0, out=large[: len(piece)])
                out[at // 8 : packed_size(at + piece.size)] = np.packbits(positive, bitorder="little")
            means /= part.block

    def extract(self, payload: Payload, out: Tensor | None = None) -> Tensor:
        """Return the signs, in the payload's shape, times their blocks' scales (a vote: times what a sign is worth)."""
        return write(lambda into: self._pieces(payload, into), payload, out, payload.tensors[-1].device)

    def add_to(self, target: Tensor, payload: Payload, alpha: float = 1.0) -> None:
        """Add `alpha` times the decoded tensor to `target`, any shape, block by block, in place."""
        check_fits(payload, target)
        if (kernels := kernels_for(target)) is not None and abs(alpha) == 1:
            kernels.decode_signs(payload.tensors[-1], self._scales(payload), self.block, target, alpha)
        else:
            accumulate(lambda into: self._pieces(payload, into), target, alpha)

    def planes(self, payload: Payload) -> tuple[Tensor, ...]:
        """Return the bytes of the scales and of the signs."""
        return tuple(t.view(torch.uint8) for t in payload.tensors)

    def from_planes(self, planes: tuple[Tensor, ...], meta: Meta) -> Payload:
        """Build the payload from the bytes of scales and signs, uint8 1-D."""
        dtypes = [dtype for dtype, _ in self.layout(meta.numel)]
        return self.payload([plane.view(dtype) for plane, dtype in zip(planes, dtypes, strict=True)], meta)

    def _unit(self) -> float:
        """What a sign is worth before scaling."""
        return 1.0

    def _scales(self, payload: Payload) -> Tensor | float:
        """What a sign is worth: of each block, or of a vote's every element."""
        return self._unit() if self.vote else payload.tensors[0]

    def _pieces(self, payload: Payload, into: Tensor | None) -> DecodedChunks:
        packed, n = payload.tensors[-1], payload.meta.numel
        scales = None if self.vote else payload.tensors[0]
        if into is not None and into.device == packed.device and (kernels := kernels_for(into)) is not None:
            kernels.decode_signs(packed, self._scales(payload), self.block, into)
            yield 0, n, into
            return
        if packed.device.type == "cpu":
            yield from self._pieces_on_cpu(packed, scales, n, into)
            return
        for start, end in spans(n, self.block, packed.device):
            values = unpack_bits(packed[start // 8 : packed_size(end)], end - start).float().mul_(2).sub_(1)
            if scales is None:
                values.mul_(self._unit())
            else:
                first = start // self.block
                rows(values, self.block).mul_(scales[first : first + block_count(end - start, self.block)].view(-1, 1))
            yield start, end, values if into is None else into[start:end].copy_(values)

    def _pieces_on_cpu(self, packed: Tensor, scales: Tensor | None, n: int, into: Tensor | None) -> DecodedChunks:
        signs = _table() * np.float32(self._unit())
        for part in tiles(n, self.block):
            whole = None if into is None else part.cut(into)
            factors = None if scales is None else part.per_block(scales)[:, None]
            scratch = np.empty((part.step, part.block), np.float32)
            for row in range(0, part.rows, part.step):
                count = min(part.step, part.rows - row)
                values = scratch[:count] if whole is None else whole[row : row + count]
                at = part.start + row * part.block
                end = at + count * part.block
                _look_up(signs, packed.numpy()[at // 8 : packed_size(end)], values.reshape(-1))
                if factors is not None:
                    np.multiply(values, factors[row : row + count], out=values)
                yield at, end, torch.from_numpy(values.reshape(-1))


@dataclass(frozen=True)
class Majority(Sign):
    """The way back of a vote: the sign of the sum of signs, worth `magnitude`."""

    def relay(self) -> Codec:
        """Return itself: the outcome is not voted on again."""
        return self

    def _unit(self) -> float:
        return self.magnitude


def _first(matrix: Tensor, counts: Sequence[int]) -> list[Tensor]:
    """Return so many first elements of each row."""
    return [row[:count] for row, count in zip(matrix, counts, strict=True)]


def _voted(values: Tensor, first: int) -> Tensor:
    """True where positive; zeros take turns, by the parity of `first` plus their position."""
    turn = (torch.arange(first, first + values.numel(), device=values.device) & 1).bool()
    return (values > 0) | ((values == 0) & turn)


@lru_cache(maxsize=1)
def _turns() -> npt.NDArray[np.bool_]:
    """False, True and so on: whose turn it is among zeros, for a piece that begins at an even or an odd number."""
    return np.arange(CHUNK + 1) % 2 == 1


@lru_cache(maxsize=1)
def _table() -> npt.NDArray[np.float32]:
    """The eight signs that each byte holds: [256, 8]."""
    every = np.arange(256, dtype=np.uint8)[:, None]
    return np.unpackbits(every, axis=1, bitorder="little").astype(np.float32) * 2 - 1


def _look_up(signs: npt.NDArray[np.float32], packed: npt.NDArray[np.uint8], out: npt.NDArray[np.float32]) -> None:
    """Write the eight signs of each byte to out [n]."""
    whole, rest = divmod(out.size, 8)
    np.take(signs, packed[:whole], axis=0, out=out[: 8 * whole].reshape(-1, 8), mode="clip")
    if rest:
        out[8 * whole :] = signs[packed[whole], :rest]


CODEC = Sign
