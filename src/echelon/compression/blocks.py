"""Blocks of elements that share a scale: stochastic rounding to whole levels, and back.

A block x of `block` elements becomes codes c = floor(L x / s + L + u) in 0..2L with s = max|x| and dither u in [0, 1);
it is decoded to (c - L) s / L. E[decoded] = x, |decoded - x| < s / L.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from echelon.compression import dither
from echelon.compression.base import State, refuse_nonfinite
from echelon.compression.chunks import CHUNK, spans

# L x / s + L + u must stay below 2L + 1 after rounding to float32; shrinking the range by this much ensures it.
_MARGIN = 1 - 2e-6
# Blocks below this are sent as zero: L / s would overflow.
_TINY = 1e-35


@dataclass(frozen=True)
class Grid:
    """What values are rounded to.

    Attributes:
        levels: L, positive levels; codes run from 0 to 2L (L at most 127).
        block: elements that share a scale, at most 65,536.
        clip: values beyond so many root mean squares of their block are cut off first; 0: none are.
    """

    levels: int
    block: int
    clip: float = 0.0

    def __post_init__(self) -> None:
        if not 1 <= self.levels <= 127:
            raise ValueError(f"levels must be 1 to 127, the nearest is {1 if self.levels < 1 else 127}")
        check_block(self.block)
        if self.clip < 0:
            raise ValueError("clip must be positive, or 0 for none")


def check_block(block: int) -> None:
    """Raise ValueError, in words, unless a block size is 1 to 65,536."""
    if not 1 <= block <= CHUNK:
        raise ValueError(f"block and bucket must be 1 to {CHUNK}, the nearest is {1 if block < 1 else CHUNK}")


def block_count(numel: int, block: int) -> int:
    """Number of blocks, a ragged last one included."""
    return -(-numel // block)


def rows(piece: Tensor, block: int) -> Tensor:
    """View a piece of whole blocks as [blocks, block]; a ragged last block as one row."""
    return piece.view(-1, block) if piece.numel() % block == 0 else piece.view(1, -1)


def quantise(x: Tensor, grid: Grid, state: State) -> tuple[Tensor, Tensor]:
    """Round float32 x [n] stochastically; the dither is that of the state's step and sender.

    Returns:
        scales s / L, float32 [blocks], and codes, uint8 [n].

    Raises:
        NonFiniteError: x holds NaN or infinity.
    """
    n, on_cpu = x.numel(), x.device.type == "cpu"
    scales = torch.empty(block_count(n, grid.block), device=x.device)
    codes = torch.empty(n, dtype=torch.uint8, device=x.device)
    if n == 0:
        return scales, codes
    stretch = CHUNK // grid.block * grid.block
    shifted = (
        dither.table(x.device) + grid.levels
        if on_cpu
        else dither.gathered(state.own_key(), n, stretch, x.device).add_(grid.levels)
    )
    starts = dither.offsets(state.own_key(), n // stretch + 1) if on_cpu else [0]
    scratch = torch.empty(stretch if on_cpu else n, device=x.device)
    for start, end in spans(n, grid.block, x.device):
        buffer = rows(scratch[: end - start], grid.block)
        values = rows(x[start:end], grid.block)
        scale = _scales(values, grid, buffer, state)
        begin = starts[start // stretch] + start % stretch if on_cpu else start
        noise = rows(shifted[begin : begin + end - start], grid.block)
        inverse = torch.where(scale > _TINY, _MARGIN * grid.levels / scale, 0.0)
        if grid.clip:
            values = torch.maximum(torch.minimum(values, scale), -scale)
        torch.addcmul(noise, values, inverse, out=buffer)
        _to_bytes(buffer.view(-1), codes[start:end])
        first = start // grid.block
        steps = torch.where(scale > _TINY, scale / (_MARGIN * grid.levels), 0.0)
        scales[first : first + scale.numel()] = steps.view(-1)
    return scales, codes


def _scales(values: Tensor, grid: Grid, buffer: Tensor, state: State) -> Tensor:
    """Return max|x|, or what clipping leaves of it, of each row: [rows, 1]."""
    if values.device.type == "cpu":
        peaks = np.abs(values.numpy(), out=buffer.numpy()).max(axis=1, keepdims=True)
        scale = torch.from_numpy(peaks)
    else:
        scale = values.abs().amax(dim=1, keepdim=True)
    refuse_nonfinite(scale.max(), state)
    if grid.clip:
        rms = (values / scale.clamp_min(_TINY)).square_().mean(dim=1, keepdim=True).sqrt_() * scale
        scale = torch.minimum(scale, grid.clip * rms)
    return scale


def _to_bytes(values: Tensor, out: Tensor) -> None:
    """Truncate non-negative floats to uint8."""
    if out.device.type == "cpu":
        np.copyto(out.numpy(), values.numpy(), casting="unsafe")
    else:
        out.copy_(values)


def dequantise(scales: Tensor, codes: Tensor, grid: Grid) -> Iterator[tuple[int, int, Tensor]]:
    """Yield decoded pieces (start, end, float32 values); the values are overwritten by the next piece."""
    n, on_cpu = codes.numel(), codes.device.type == "cpu"
    size = min(n, CHUNK // grid.block * grid.block) if on_cpu else n
    scratch = torch.empty(size, device=codes.device)
    signed = torch.empty(size, dtype=torch.int8, device=codes.device)
    for start, end in spans(n, grid.block, codes.device):
        values, steps = scratch[: end - start], signed[: end - start]
        # c - L wraps into -L..L as int8, whose conversion to float is the fastest there is.
        torch.sub(codes[start:end].view(torch.int8), grid.levels, out=steps)
        if on_cpu:
            np.copyto(values.numpy(), steps.numpy())
        else:
            values.copy_(steps)
        first = start // grid.block
        scale = scales[first : first + block_count(end - start, grid.block)].view(-1, 1)
        rows(values, grid.block).mul_(scale)
        yield start, end, values
