"""`...+huffman`: lossless coding of a codec's symbols, where it saves time.

Frequent symbols get shorter codes. Echelon measures the link and the coding while the run goes on, and codes a message
only if that takes less time than sending the bytes that it saves. Decoded values are the same, only bytes are fewer.

Helps: Slow links, after int8, qsgd, ternary, sign, topk or threshold.
Costs: computation on the CPU; tensors on a GPU are copied there.
Needs: a codec of symbols in front: qsgd+huffman.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from echelon.compression import prefix_code
from echelon.compression.base import Codec, Payload, State
from echelon.compression.transforms.base import Wrapper
from echelon.compression.wire import Layout

ENTROPY_COUNTERS = ("plain_bytes", "sent_bytes", "planes_coded", "planes_plain", "planes_slow", "coding_s", "spared_s")
_RATE = "bytes_per_s"
_HEAD = 3
_PACE_SAMPLES = 31
_PACE_LEAST = 1024
"""Shorter streams and messages measure the call, not the pace."""
_TRIAL_EVERY = 64
"""Messages of a tensor between two that are coded whatever was measured before, so that it is measured again."""


class CodingPace:
    """Seconds per symbol to encode and to decode, seconds per byte to send: the median of the last measurements.

    A byte's seconds are those for which a message's sender and receiver were busy with it, waiting for each other
    included: what a shorter message would have saved. Until all three are known nobody can say whether coding pays.
    """

    def __init__(self) -> None:
        self._encode: deque[float] = deque(maxlen=_PACE_SAMPLES)
        self._decode: deque[float] = deque(maxlen=_PACE_SAMPLES)
        self._send: deque[float] = deque(maxlen=_PACE_SAMPLES)

    def encoded(self, symbols: int, seconds: float) -> None:
        """Note how long it took to encode a stream."""
        _note(self._encode, symbols, seconds)

    def decoded(self, symbols: int, seconds: float) -> None:
        """Note how long it took to decode a stream."""
        _note(self._decode, symbols, seconds)

    def sent(self, n_bytes: int, seconds: float) -> None:
        """Note how long a message was under way."""
        _note(self._send, n_bytes, seconds)

    def coding_s(self, symbols: int) -> float:
        """Expect the seconds to encode and decode a stream; where only one was measured, the other takes as long."""
        known = [median(side) for side in (self._encode, self._decode) if side]
        return symbols * sum(known) * 2 / max(len(known), 1)

    @property
    def bytes_per_s(self) -> float:
        """The rate at which messages travel; 0: not measured."""
        return 1 / median(self._send) if self._send else 0.0

    def pays(self, symbols: int, saved_bytes: int) -> bool:
        """Whether sending what would be saved takes longer than coding; true where it cannot be told."""
        return not self._send or saved_bytes / self.bytes_per_s > self.coding_s(symbols)


def _note(side: deque[float], count: int, seconds: float) -> None:
    if count >= _PACE_LEAST and seconds > 0:
        side.append(seconds / count)


def entropy_coded(states: Iterable[State]) -> dict[str, float]:
    """Sum what entropy coding did over states; empty where there is none.

    Returns:
        `plain_bytes`, `sent_bytes`: of messages before and after; `planes_coded`, `planes_plain`: streams that were
        coded, and that were sent plain; of these `planes_slow` because coding them would have taken longer than it
        saved; `coding_s`: seconds to encode and decode; `spared_s`: seconds of the link that this saved;
        `bytes_per_s`: the rate of the link as last measured; 0: it is not known, and `spared_s` neither.
    """
    sums: dict[str, float] = {}
    for state in states:
        for key in ENTROPY_COUNTERS:
            if key in state.numbers:
                sums[key] = sums.get(key, 0) + state.numbers[key]
        if _RATE in state.numbers:
            sums[_RATE] = max(sums.get(_RATE, 0.0), state.numbers[_RATE])
    return sums


@dataclass(frozen=True)
class Huffman(Wrapper):
    """Around a codec: each stream of its symbols (`Codec.planes`) is coded with its own Huffman table, or sent plain.

    A stream is coded only if that makes it shorter, table and lane sizes counted; this is known from the symbols'
    counts before any coding. Where the rate of the link has been measured (`transferred`), what is saved must also take
    longer to send than to encode and decode, as measured here. Values never depend on it, bytes do. The state counts,
    summed over messages, what `entropy_coded` returns; "sent_bits" is the last message's bits per element.

    The coder itself runs on the host; tensors on a device are copied.

    Attributes:
        inner: the codec, with its error feedback.
        pace: what was measured.
    """

    name: ClassVar[str] = "huffman"
    inner: Codec
    pace: CodingPace = field(default_factory=CodingPace, compare=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "name", f"{self.inner.name}+huffman")
        object.__setattr__(self, "linear", False)

    @property
    def takes_entropy_coding(self) -> bool:
        """False: symbols are coded once."""
        return False

    def relay(self) -> Codec:
        """Return the relay of the codec inside, coded too, by the same measurements."""
        return Huffman(self.inner.relay(), self.pace)

    def at(self, step: int) -> Codec:
        """Return the codec of a step's message, coded too."""
        inner = self.inner.at(step)
        return self if inner is self.inner else Huffman(inner, self.pace)

    def transferred(self, n_bytes: int, seconds: float) -> None:
        """Note how long a message was under way."""
        self.pace.sent(n_bytes, seconds)

    def init_state(self, name: str, like: Tensor, seed: int = 0, stream: int = 0) -> State:
        """Return the state of the codec inside for a tensor like `like`, any shape, with counters at zero."""
        state = self.inner.init_state(name, like, seed, stream)
        state.numbers |= dict.fromkeys((*ENTROPY_COUNTERS, _RATE, "sent_bits"), 0)
        return state

    def layout(self, numel: int) -> Layout:
        """Return, for each plane, whether it is coded, its symbols and bytes; then the planes, one after another."""
        # Per plane: 1 if coded, symbols, bytes; then the planes, one after another.
        return ((torch.int64, None), (torch.uint8, None))

    def compress(self, tensor: Tensor, state: State) -> Payload:
        """Encode a tensor of any shape with the codec inside, and code each plane of symbols where that pays."""
        plain = self.inner.compress(tensor, state)
        heads: list[int] = []
        bodies: list[Tensor] = []
        trial = state.step % _TRIAL_EVERY == 1
        for plane in self.inner.planes(plain):
            coded = self._shorter(plane, state, trial)
            body = plane if coded is None else coded
            heads += [int(coded is not None), plane.numel(), body.numel()]
            bodies.append(body)
            state.numbers["planes_plain" if coded is None else "planes_coded"] += 1
        tensors = torch.tensor(heads, device=tensor.device), torch.cat(bodies)
        payload = self.payload(tensors, plain.meta)
        state.numbers["plain_bytes"] += plain.n_bytes
        state.numbers["sent_bytes"] += payload.n_bytes
        state.numbers[_RATE] = self.pace.bytes_per_s
        state.numbers["sent_bits"] = 8 * payload.n_bytes / max(tensor.numel(), 1)
        return payload

    def decoded(self, payload: Payload) -> Payload:
        """Return the inner codec's payload.

        Raises:
            ValueError: a damaged message.
        """
        heads, body = payload.tensors
        planes: list[Tensor] = []
        at = 0
        sizes = heads.tolist()
        if len(sizes) % _HEAD:
            raise ValueError("message describes an incomplete stream")
        for i in range(0, len(sizes), _HEAD):
            coded, symbols, n_bytes = sizes[i : i + _HEAD]
            if not 0 <= n_bytes <= body.numel() - at or symbols < 0 or symbols > _LIMIT * (n_bytes + 1):
                raise ValueError("message describes a stream that it does not hold")
            stream = body[at : at + n_bytes]
            planes.append(self._expand(stream, symbols) if coded else stream.clone())
            at += n_bytes
        return self.inner.from_planes(tuple(planes), payload.meta)

    def extract(self, payload: Payload, out: Tensor | None = None) -> Tensor:
        """Decode the planes, then as the codec inside does, in the payload's shape."""
        return self.inner.extract(self.decoded(payload), out)

    def add_to(self, target: Tensor, payload: Payload, alpha: float = 1.0) -> None:
        """Decode the planes, then add to `target`, any shape, as the codec inside does."""
        self.inner.add_to(target, self.decoded(payload), alpha)

    def extract_together(self, payloads: Sequence[Payload], outs: Sequence[Tensor]) -> None:
        """Decode the planes, then as the codec inside does."""
        self.inner.extract_together([self.decoded(payload) for payload in payloads], outs)

    def add_together(self, target: Tensor, payloads: Sequence[Payload]) -> None:
        """Decode the planes, then add to `target`, any shape, as the codec inside does."""
        self.inner.add_together(target, [self.decoded(payload) for payload in payloads])

    def clear_sent(self, target: Tensor, payload: Payload) -> None:
        """Zero in `target`, any shape, what the codec inside sent."""
        self.inner.clear_sent(target, self.decoded(payload))

    def n_bytes(self, numel: int) -> int | None:
        """Return None: it depends on the values."""
        return None

    def bits_per_element(self, numel: int, state: State | None = None) -> float:
        """As the last message; without a state, the inner codec's: an upper bound but for a few bytes per stream."""
        seen = state.numbers["sent_bits"] if state else 0.0
        return seen or self.inner.bits_per_element(numel, state)

    @property
    def fixed_size(self) -> bool:
        """False: the size depends on the values."""
        return False

    def _shorter(self, plane: Tensor, state: State, trial: bool) -> Tensor | None:
        """Return the coded plane; None if plain is as short, or sooner there."""
        counts = _counts(plane)  # of a GPU: the symbols themselves are copied only if they are coded
        began = time.perf_counter()
        lengths = prefix_code.code_lengths(counts)
        saved = plane.numel() - prefix_code.coded_size(counts, lengths)
        if saved <= 0:
            return None
        if not (trial or self.pace.pays(plane.numel(), saved)):
            state.numbers["planes_slow"] += 1
            return None
        symbols = plane.cpu().numpy()
        coded = torch.from_numpy(prefix_code.encode(symbols, lengths)).to(plane.device)
        self.pace.encoded(symbols.size, time.perf_counter() - began)
        state.numbers["coding_s"] += self.pace.coding_s(symbols.size)
        if rate := self.pace.bytes_per_s:
            state.numbers["spared_s"] += saved / rate
        return coded

    def _expand(self, stream: Tensor, symbols: int) -> Tensor:
        began = time.perf_counter()
        plain = torch.from_numpy(prefix_code.decode(stream.cpu().numpy(), symbols)).to(stream.device)
        self.pace.decoded(symbols, time.perf_counter() - began)
        return plain


def _counts(plane: Tensor) -> NDArray[np.int64]:
    """Return how often each byte occurs (256,); waits for a GPU."""
    if plane.is_cuda:
        found: NDArray[np.int64] = torch.bincount(plane, minlength=256).cpu().numpy()
        return found
    return np.bincount(plane.numpy(), minlength=256)


# A code has at least one bit, so a coded byte cannot stand for more symbols.
_LIMIT = 8
