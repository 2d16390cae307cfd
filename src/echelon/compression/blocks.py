"""Blocks of elements that share a scale: stochastic rounding to whole levels, and back.

A block x of `block` elements becomes codes c = floor(L x / s + L + u) in 0..2L with s = max|x| and dither u in [0, 1);
it is decoded to (c - L) s / L. E[decoded] = x, |decoded - x| < s / L.

The dither's numbers are not drawn one by one. One table holds the 131,072 values (k + 1/2) / 131,072 in an order fixed
by an integer hash; each stretch of 131,072 elements (fewer where blocks do not divide it) reads the table from an
offset hashed from (seed, tensor, step, sender, stretch). Over the offsets every element's dither is exactly uniform, so
rounding is unbiased to 2**-17 of a level; and all devices give the same bits at the price of one addition per element.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from echelon.compression.base import NonFiniteError, State, empty, moved, refuse_nonfinite
from echelon.compression.chunks import CHUNK, DecodedChunks, as_rows, spans, tiles
from echelon.compression.native import Dither, Kernels, Packing, Rounding
from echelon.core.bounds import Bounds, check_bounds

DITHER_PERIOD = 1 << 17

_U64 = npt.NDArray[np.uint64]

# L x / s + L + u must stay below 2L + 1 after rounding to float32; shrinking the range by this much ensures it.
_MARGIN = 1 - 2e-6
# Blocks below this are sent as zero: L / s would overflow.
_TINY = 1e-35


@dataclass(frozen=True)
class Grid:
    """What values are rounded to.

    Attributes:
        levels: L, positive levels; codes run from 0 to 2L (L at most 127).
        block: elements that share a scale, at most 131,072.
        clip: values beyond so many root mean squares of their block are cut off first; 0: none are.
    """

    levels: Annotated[int, Bounds(least=1, most=127)]
    block: Annotated[int, Bounds(least=1, most=131_072)]
    clip: Annotated[float, Bounds(least=0)] = 0.0

    def __post_init__(self) -> None:
        check_bounds(self)


def block_count(numel: int, block: int) -> int:
    """Number of blocks, a ragged last one included."""
    return -(-numel // block)


def rows(piece: Tensor, block: int) -> Tensor:
    """View a piece of whole blocks as [blocks, block]; a ragged last block as one row."""
    return piece.view(-1, block) if piece.numel() % block == 0 else piece.view(1, -1)


def quantise(x: Tensor, grid: Grid, state: State) -> tuple[Tensor, Tensor]:
    """Round float32 x [n] stochastically; the dither is that of the state's step and sender.

    Returns:
        steps s / L, float32 [blocks], and codes, uint8 [n].

    Raises:
        NonFiniteError: x holds NaN or infinity.
    """
    codes = empty(x.numel(), torch.uint8, x.device)
    scales = _scales(x, grid)
    if x.numel() == 0:
        return scales, codes
    refuse_nonfinite(scales.max(), state)
    inverse = torch.where(scales > _TINY, _MARGIN * grid.levels / scales, 0.0)
    if x.device.type == "cpu":
        _round_on_cpu(x, inverse, codes, grid, state.own_key())
    else:
        noise = gathered_dither(state.own_key(), x.numel(), _stretch(grid), x.device).add_(grid.levels)
        for start, end in spans(x.numel(), grid.block, x.device):
            values = rows(x[start:end], grid.block)
            scale, factor = (_of_span(t, start, end, grid.block) for t in (scales, inverse))
            if grid.clip:
                values = torch.maximum(torch.minimum(values, scale), -scale)
            codes[start:end] = torch.addcmul(rows(noise[start:end], grid.block), values, factor).view(-1)
    limit = torch.full_like(scales, _MARGIN * grid.levels)  # a GPU multiplies by a plain number's rounded inverse
    return torch.where(scales > _TINY, scales / limit, 0.0), codes


def quantise_packed(
    kernels: Kernels, x: Tensor, grid: Grid, packing: Packing, n_bytes: int, state: State
) -> tuple[Tensor, Tensor]:
    """Do what `quantise` does to x [n] on a CPU, and pack the codes into uint8 [n_bytes], in one pass.

    Raises:
        NonFiniteError: x holds NaN or infinity.
    """
    steps = empty(block_count(x.numel(), grid.block), torch.float32, x.device)
    packed = empty(n_bytes, torch.uint8, x.device)
    starts = moved(np.array(dither_offsets(state.own_key(), x.numel() // _stretch(grid) + 1), np.int64), x.device)
    dither = Dither(dither_table(x.device), starts, _stretch(grid))
    if not kernels.quantise(x, rounding(grid), dither, packing, steps, packed):
        raise NonFiniteError(state.name)
    return steps, packed


def rounding(grid: Grid) -> Rounding:
    """Return the numbers of a grid that the compiled loops compute with."""
    return Rounding(grid.block, grid.levels, _MARGIN * grid.levels, grid.clip)


def quantise_parts(tensors: Sequence[Tensor], grid: Grid, states: Sequence[State]) -> list[tuple[Tensor, Tensor]]:
    """Do what `quantise` does, to several 1-D tensors in one go: a GPU is done before the host asks for the next.

    Each lies in stretches of its own, filled up with zeros; so the dither is that of each alone.

    Raises:
        NonFiniteError: one holds NaN or infinity.
    """
    device, longest = tensors[0].device, max(x.numel() for x in tensors)
    stretch = min(_stretch(grid), block_count(longest, grid.block) * grid.block)
    counts = [-(-x.numel() // stretch) for x in tensors]
    values = torch.zeros(sum(counts), stretch, dtype=torch.float32, device=device)
    places = np.cumsum([0, *counts[:-1]]) * stretch
    for x, place in zip(tensors, places, strict=True):
        values.view(-1)[place : place + x.numel()] = x
    blocks = values.view(-1, grid.block)
    scales = _scales_of(blocks, [x.numel() for x in tensors], grid, counts)
    refuse_nonfinite(scales.max(), states[0])
    inverse = torch.where(scales > _TINY, _MARGIN * grid.levels / scales, 0.0)
    if grid.clip:
        blocks = torch.maximum(torch.minimum(blocks, scales), -scales)
    starts = [start for s, count in zip(states, counts, strict=True) for start in dither_offsets(s.own_key(), count)]
    noise = dither_table(device).unfold(0, stretch, 1)[moved(np.array(starts), device)].add_(grid.levels)
    codes = torch.addcmul(noise.view(-1, grid.block), blocks, inverse).to(torch.uint8).view(-1)
    limit = torch.full_like(scales, _MARGIN * grid.levels)
    steps = torch.where(scales > _TINY, scales / limit, 0.0).view(-1)
    return [
        (steps[place // grid.block :][: block_count(x.numel(), grid.block)], codes[place : place + x.numel()])
        for x, place in zip(tensors, places, strict=True)
    ]


def _scales_of(blocks: Tensor, sizes: Sequence[int], grid: Grid, counts: Sequence[int]) -> Tensor:
    """Return the scale of each of the blocks that tensors of `sizes` fill, `counts` stretches each, as a column."""
    scales = blocks.abs().amax(dim=1, keepdim=True)
    if not grid.clip:
        return scales
    relative = (blocks / scales.clamp_min(_TINY)).square_().sum(dim=1, keepdim=True)
    per_stretch = len(blocks) // sum(counts)
    filled = np.full(len(blocks), float(grid.block), np.float32)
    for size, before in zip(sizes, np.cumsum([0, *counts[:-1]]) * per_stretch, strict=True):
        if rest := size % grid.block:
            filled[before + size // grid.block] = rest
    root = relative.div_(moved(filled, blocks.device).view(-1, 1)).sqrt_()
    return scales * torch.clamp(grid.clip * root, max=1.0)


def dequantise_parts(coded: Sequence[tuple[Tensor, Tensor]], grid: Grid) -> list[Tensor]:
    """Decode several pairs of steps and codes, from `quantise`, in one go; returns float32 [n] each."""
    sizes = [codes.numel() for _, codes in coded]
    rows_ = block_count(max(sizes), grid.block)
    codes = as_rows([codes for _, codes in coded], rows_ * grid.block)
    steps = as_rows([steps for steps, _ in coded], rows_)
    values = torch.sub(codes.view(torch.int8), grid.levels).float()
    values.view(-1, grid.block).mul_(steps.view(-1, 1))
    return [row[:size] for row, size in zip(values, sizes, strict=True)]


def _stretch(grid: Grid) -> int:
    """Elements that read the dither from one offset: the whole blocks of a cache-sized piece."""
    return CHUNK // grid.block * grid.block


def _of_span(per_block: Tensor, start: int, end: int, block: int) -> Tensor:
    """Return the values of the blocks of a span as a column."""
    return per_block[start // block : start // block + block_count(end - start, block)].view(-1, 1)


def _scales(x: Tensor, grid: Grid) -> Tensor:
    """Return max|x|, or what clipping leaves of it, of each block; NaN and infinity carry over."""
    scales = empty(block_count(x.numel(), grid.block), torch.float32, x.device)
    if x.device.type == "cpu":
        _scales_on_cpu(x, scales, grid)
        return scales
    for start, end in spans(x.numel(), grid.block, x.device):
        values = rows(x[start:end], grid.block)
        out = _of_span(scales, start, end, grid.block)
        out.copy_(values.abs().amax(dim=1, keepdim=True))
        if grid.clip:
            # Relative to the maximum, so that squares neither overflow nor vanish.
            relative = (values / out.clamp_min(_TINY)).square_().mean(dim=1, keepdim=True).sqrt_()
            out.mul_(torch.clamp(grid.clip * relative, max=1.0))
    return scales


def _scales_on_cpu(x: Tensor, scales: Tensor, grid: Grid) -> None:
    for part in tiles(x.numel(), grid.block):
        values, peaks = part.cut(x), part.per_block(scales)
        scratch = np.empty((part.step, part.block), np.float32)
        for row in range(0, part.rows, part.step):
            piece, out = values[row : row + part.step], peaks[row : row + part.step]
            magnitude = np.abs(piece, out=scratch[: len(piece)])
            np.max(magnitude, axis=1, out=out)
            if grid.clip:
                with np.errstate(invalid="ignore"):  # infinity is refused later, by its scale
                    magnitude /= np.maximum(out, np.float32(_TINY))[:, None]
                root = np.sqrt(np.square(magnitude, out=magnitude).mean(axis=1))
                out *= np.minimum(np.float32(grid.clip) * root, np.float32(1))


def _round_on_cpu(x: Tensor, inverse: Tensor, codes: Tensor, grid: Grid, key: int) -> None:
    """Write floor(x / step + L + u). In numpy: its views cost a tenth of torch's, its float to byte is the fastest."""
    noise = (dither_table(x.device) + grid.levels).numpy()
    starts = dither_offsets(key, x.numel() // _stretch(grid) + 1)
    limit = np.float32(_MARGIN * grid.levels)
    for part in tiles(x.numel(), grid.block):
        values, factors, out = part.cut(x), part.per_block(inverse)[:, None], part.cut(codes)
        scratch = np.empty((part.step, part.block), np.float32)
        for row in range(0, part.rows, part.step):
            piece = values[row : row + part.step]
            buffer = scratch[: len(piece)]
            np.multiply(piece, factors[row : row + part.step], out=buffer)
            if grid.clip:
                np.clip(buffer, -limit, limit, out=buffer)
            at = part.start + row * part.block
            begin = starts[at // _stretch(grid)] + at % _stretch(grid)
            np.add(buffer, noise[begin : begin + piece.size].reshape(buffer.shape), out=buffer)
            np.copyto(out[row : row + part.step], buffer, casting="unsafe")


def dequantise(steps: Tensor, codes: Tensor, grid: Grid, into: Tensor | None) -> DecodedChunks:
    """Yield decoded pieces (start, end, float32 values).

    Args:
        steps: float32 [blocks], from `quantise`.
        codes: uint8 [n].
        grid: what `quantise` was given.
        into: float32 [n] that the pieces are parts of; None: a scratch that the next piece overwrites.
    """
    if codes.device.type == "cpu":
        yield from _dequantise_on_cpu(steps, codes, grid, into)
        return
    for start, end in spans(codes.numel(), grid.block, codes.device):
        # c - L wraps into -L..L as int8.
        values = torch.sub(codes[start:end].view(torch.int8), grid.levels).float()
        rows(values, grid.block).mul_(_of_span(steps, start, end, grid.block))
        yield start, end, values if into is None else into[start:end].copy_(values)


def _dequantise_on_cpu(steps: Tensor, codes: Tensor, grid: Grid, into: Tensor | None) -> DecodedChunks:
    for part in tiles(codes.numel(), grid.block):
        coded, factors = part.cut(codes).view(np.int8), part.per_block(steps)[:, None]
        whole = None if into is None else part.cut(into)
        scratch = np.empty((part.step, part.block), np.float32)
        signed = np.empty((part.step, part.block), np.int8)
        for row in range(0, part.rows, part.step):
            piece = coded[row : row + part.step]
            values = scratch[: len(piece)] if whole is None else whole[row : row + part.step]
            # c - L wraps into -L..L as int8, whose conversion to float is the fastest there is.
            np.subtract(piece, np.int8(grid.levels), out=signed[: len(piece)])
            np.copyto(values, signed[: len(piece)])
            np.multiply(values, factors[row : row + part.step], out=values)
            at = part.start + row * part.block
            yield at, at + piece.size, torch.from_numpy(values.reshape(-1))


def _hash(keys: _U64) -> _U64:
    """Hash 64-bit numbers elementwise (splitmix64)."""
    with np.errstate(over="ignore"):
        x = keys + np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@lru_cache(maxsize=4)
def dither_table(device: torch.device) -> Tensor:
    """Return the table twice over: float32 [2 * DITHER_PERIOD]; do not write to it."""
    order = np.argsort(_hash(np.arange(DITHER_PERIOD, dtype=np.uint64)), kind="stable")
    once = ((order + 0.5) / DITHER_PERIOD).astype(np.float32)
    return torch.from_numpy(np.concatenate([once, once])).to(device)


def dither_offsets(key: int, count: int) -> list[int]:
    """Return where each of `count` stretches starts to read the table, from the message's key."""
    stretches = np.arange(count, dtype=np.uint64) + np.uint64(key)
    return [int(v) for v in _hash(_hash(stretches)) & np.uint64(DITHER_PERIOD - 1)]


def gathered_dither(key: int, n: int, stretch: int, device: torch.device) -> Tensor:
    """Return the dither of n elements in stretches of that length: float32 [n], as if read window by window."""
    starts = moved(np.array(dither_offsets(key, -(-n // stretch))), device)
    index = torch.arange(n, device=device)
    return dither_table(device)[starts[index // stretch] + index % stretch]
