"""sign: one bit an element."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from echelon.compression.base import Codec, Meta, Payload, State, check_momentum, empty, flat32, refuse_nonfinite
from echelon.compression.bits import pack_bits, packed_size, unpack_bits
from echelon.compression.blocks import block_count, check_block, rows
from echelon.compression.chunks import CHUNK, Pieces, accumulate, spans, write
from echelon.compression.wire import Layout


@dataclass(frozen=True)
class Sign(Codec):
    """delta = (|p|_1 / d) sign(p) per block of d elements, p = gradient + kept error; error feedback keeps p - delta.

    The momentum is applied in the worker, before encoding: applied after decoding, together with error feedback, it
    amplifies the error and training collapses. 1 + 32 / block bits per element. Biased.

    `vote=true`: majority vote without scales and without error feedback. Workers send sign(m), m their momentum
    average; every element of the result is +magnitude or -magnitude, whichever most workers said (a tie takes turns
    by element and step). The result is a direction: it is never divided by the number of workers.

    Attributes:
        block: elements that share a scale.
        vote: majority vote.
        momentum: applied in the worker; the optimizer's must be 0. Left out: `registry.place_momentum` fills it in.
        magnitude: size of every element of a vote's result (gradient units: times the learning rate gives the step).

    Papers: Seide et al. 2014 (1-bit SGD); Karimireddy et al. 2019, arXiv:1901.09847 (EF-signSGD); Bernstein et al.
    2018, arXiv:1802.04434 (majority vote, Signum).
    """

    name: ClassVar[str] = "sign"
    momentum_inside: ClassVar[bool] = True
    block: int = 4096
    vote: bool = False
    momentum: float | None = None
    magnitude: float = 0.02

    def __post_init__(self) -> None:
        check_block(self.block)
        if self.block % 8:
            raise ValueError(f"block must be a multiple of 8, the nearest is {max(round(self.block / 8), 1) * 8}")
        check_momentum(self.momentum)
        if self.magnitude <= 0:
            raise ValueError("magnitude must be positive, such as 0.02")

    @property
    def biased(self) -> bool:
        return not self.vote

    @property
    def direction(self) -> bool:
        return self.vote

    @property
    def absorbs_momentum(self) -> float | None:
        return self.momentum or None

    def relay(self) -> Codec:
        return Majority(**vars(self)) if self.vote else self

    def layout(self, numel: int) -> Layout:
        signs: Layout = ((torch.uint8, packed_size(numel)),)
        return signs if self.vote else ((torch.float32, block_count(numel, self.block)), *signs)

    def compress(self, tensor: Tensor, state: State) -> Payload:
        x = flat32(tensor)
        packed = empty(packed_size(x.numel()), torch.uint8, x.device)
        scales = torch.empty(block_count(x.numel(), self.block), device=x.device)
        for start, end in spans(x.numel(), self.block, x.device):
            values = x[start:end]
            first = start // self.block
            _mean_abs(rows(values, self.block), scales[first : first + block_count(end - start, self.block)])
            positive = _voted(values, start + state.step) if self.vote else _positive(values)
            packed[start // 8 : packed_size(end)] = pack_bits(positive)
        refuse_nonfinite(scales.max() if x.numel() else 0.0, state)
        state.numbers["step"] += 1
        return self.payload((packed,) if self.vote else (scales, packed), Meta.of(tensor))

    def extract(self, payload: Payload, out: Tensor | None = None) -> Tensor:
        return write(lambda into: self._pieces(payload, into), payload, out, payload.tensors[-1].device)

    def add_to(self, target: Tensor, payload: Payload, alpha: float = 1.0) -> None:
        accumulate(lambda into: self._pieces(payload, into), target, alpha)

    def planes(self, payload: Payload) -> tuple[Tensor, ...]:
        return tuple(t.view(torch.uint8) for t in payload.tensors)

    def from_planes(self, planes: tuple[Tensor, ...], meta: Meta) -> Payload:
        dtypes = [dtype for dtype, _ in self.layout(meta.numel)]
        return self.payload([plane.view(dtype) for plane, dtype in zip(planes, dtypes, strict=True)], meta)

    def _unit(self) -> float:
        """What a sign is worth before scaling."""
        return 1.0

    def _pieces(self, payload: Payload, into: Tensor | None) -> Pieces:
        packed, n = payload.tensors[-1], payload.meta.numel
        scratch = torch.empty(min(n, CHUNK) if packed.device.type == "cpu" else n, device=packed.device)
        for start, end in spans(n, self.block, packed.device):
            values = scratch[: end - start] if into is None else into[start:end]
            _signs(packed[start // 8 : packed_size(end)], values)
            if self.vote:
                if self._unit() != 1.0:
                    values.mul_(self._unit())
            else:
                first = start // self.block
                scale = payload.tensors[0][first : first + block_count(end - start, self.block)]
                rows(values, self.block).mul_(scale.view(-1, 1))
            yield start, end, values


@dataclass(frozen=True)
class Majority(Sign):
    """The way back of a vote: the sign of the sum of signs, worth `magnitude`."""

    def relay(self) -> Codec:
        return self

    def _unit(self) -> float:
        return self.magnitude


def _mean_abs(values: Tensor, out: Tensor) -> None:
    """Write the mean of |values| of each row into out [rows]; NaN and infinity carry over."""
    if values.device.type == "cpu":
        np.sum(np.abs(values.numpy()), axis=1, out=out.numpy())
        out.div_(values.shape[1])
    else:
        out.copy_(values.abs().mean(dim=1))


def _positive(values: Tensor) -> Tensor:
    return torch.from_numpy(values.numpy() >= 0) if values.device.type == "cpu" else values >= 0


def _voted(values: Tensor, first: int) -> Tensor:
    """True where positive; zeros take turns, by the parity of `first` plus their position."""
    turn = (torch.arange(first, first + values.numel(), device=values.device) & 1).bool()
    return (values > 0) | ((values == 0) & turn)


@lru_cache(maxsize=1)
def _table() -> npt.NDArray[np.float32]:
    """The eight signs that each byte holds: [256, 8]."""
    every = np.arange(256, dtype=np.uint8)[:, None]
    return np.unpackbits(every, axis=1, bitorder="little").astype(np.float32) * 2 - 1


def _signs(packed: Tensor, out: Tensor) -> None:
    """Unpack signs into out, float32 [n], as -1 or 1."""
    n = out.numel()
    if packed.device.type != "cpu":
        out.copy_(unpack_bits(packed, n)).mul_(2).sub_(1)
        return
    whole = n // 8
    view = out.numpy()
    np.take(_table(), packed.numpy()[:whole], axis=0, out=view[: 8 * whole].reshape(-1, 8), mode="clip")
    if n % 8:
        view[8 * whole :] = _table()[packed.numpy()[whole], : n % 8]


CODEC = Sign
