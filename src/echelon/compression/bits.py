"""Bits in bytes. On a CPU through numpy's packbits, several times faster than eager torch; elsewhere through torch.

Bit i of a stream is bit i % 8 (lowest first) of byte i // 8. Codes of b bits travel as b such streams ("planes"),
lowest bit first: any width packs with one pass per bit and no loop over elements.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from echelon.compression.state import empty


def packed_size(n_bits: int) -> int:
    """Bytes that hold so many bits."""
    return (n_bits + 7) // 8


def pack_bits(mask: Tensor) -> Tensor:
    """Pack a 1-D tensor (any non-zero is a one) into uint8 [ceil(n / 8)]."""
    if mask.device.type == "cpu":
        return torch.from_numpy(np.packbits(mask.numpy(), bitorder="little"))
    padded = torch.nn.functional.pad((mask != 0).to(torch.uint8), (0, -mask.numel() % 8)).view(-1, 8)
    shifts = torch.arange(8, dtype=torch.uint8, device=mask.device)
    return (padded << shifts).sum(dim=1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, n: int) -> Tensor:
    """Undo `pack_bits`: uint8 [n] of zeros and ones."""
    if packed.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(packed.numpy(), count=n, bitorder="little"))
    shifts = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed.unsqueeze(1) >> shifts) & 1).view(-1)[:n]


def pack_codes(codes: Tensor, width: int) -> Tensor:
    """Pack integers below 2**width into uint8 [width * ceil(n / 8)]; 8-bit codes stay as they are."""
    if width == 8 and codes.dtype == torch.uint8:
        return codes
    stride = packed_size(codes.numel())
    out = empty(width * stride, torch.uint8, codes.device)
    for start, end in _pieces(codes.numel(), codes.device):
        piece = codes[start:end]
        for bit in range(width):
            at = bit * stride + start // 8
            target = out[at : at + packed_size(end - start)]
            if codes.device.type == "cpu":
                target.numpy()[:] = np.packbits(piece.numpy() & (1 << bit), bitorder="little")
            else:
                target.copy_(pack_bits(piece & (1 << bit)))
    return out


def unpack_codes(packed: Tensor, width: int, n: int, dtype: torch.dtype = torch.uint8) -> Tensor:
    """Undo `pack_codes`."""
    if width == 8 and dtype == torch.uint8:
        return packed
    stride = packed_size(n)
    codes = empty(n, dtype, packed.device).zero_() if width == 0 else empty(n, dtype, packed.device)
    for start, end in _pieces(n, packed.device):
        piece = codes[start:end]
        for bit in range(width):
            at = bit * stride + start // 8
            plane = unpack_bits(packed[at : at + packed_size(end - start)], end - start)
            if bit == 0:
                piece.copy_(plane)
            elif dtype == torch.uint8 and packed.device.type == "cpu":
                # numpy has products of bytes vectorised, shifts not.
                shifted = np.multiply(plane.numpy(), np.uint8(1 << bit), out=plane.numpy())
                np.bitwise_or(piece.numpy(), shifted, out=piece.numpy())
            else:
                piece |= plane.to(dtype).bitwise_left_shift_(bit)
    return codes


def _pieces(n: int, device: torch.device) -> Iterator[tuple[int, int]]:
    """Yield (start, end) in whole bytes of bits; cache-sized on a CPU."""
    size = 1 << 16 if device.type == "cpu" else max(n, 1)
    for start in range(0, n, size):
        yield start, min(start + size, n)
