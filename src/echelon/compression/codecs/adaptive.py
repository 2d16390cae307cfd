"""adaptive: for each vector the smallest codec whose error stays within a bound, chosen while the run goes on.

Helps: Links that are slow now and then, and gradients that change during a run. It sends uncompressed where nothing can
    be gained.
Costs: memory for error feedback (`--dry-run` counts it), and about 1% of the time for trials (`follow_link`).
Needs: nothing. Momentum stays with the optimizer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Annotated, ClassVar

import torch
from torch import Tensor

from echelon.compression.base import Codec, Meta, Payload, State, flat, refuse_nonfinite_elements
from echelon.compression.codecs.topk import TopK
from echelon.compression.registry import codec_class
from echelon.compression.rungs import MEASURED_EVERY, RungControl
from echelon.compression.wire import Layout
from echelon.core.bounds import Bounds, check_bounds
from echelon.core.spec import spec_of

_HEAD = 8
_DENSE = ("none", "int8", "qsgd")
_DENSITIES = (0.15, 0.1, 0.07, 0.05, 0.035, 0.025, 0.018, 0.012, 0.008, 0.005, 0.003)
BACK = "back_"
"""What entries of the controller for sums on their way back begin with."""


@dataclass(frozen=True)
class Adaptive(Codec):
    """Choose among none, int8, qsgd and topk (density 0.15 down to 0.003), for each vector by itself.

    The error is the running mean of |x - C(x)|^2 / |x|^2 over messages: x is the gradient plus what error feedback
    holds, C(x) what the message carries of it. If the error is above `error`, the next more exact codec is used; if it
    is below, the next smaller one is tried. What error feedback holds is carried over from codec to codec, and an
    uncompressed message empties it. In an all-reduce the errors travel in the messages, so all ranks switch in the same
    step, two steps later.

    32 to 0.1 bits per element. Biased: error feedback sends later what a message leaves out.

    Attributes:
        error: largest running mean of the error (a share of the squared norm).
        follow_link: send gradients uncompressed while steps are measured to be faster that way. With false, the choice
            does not depend on the clock, and each run gives the same bits.

    Papers: Karimireddy et al. 2019, arXiv:1901.09847 (error feedback, whose delay the bound limits); Agarwal et al.
    2021, "Adaptive Gradient Communication via Critical Learning Regime Identification"; those of the codecs.
    """

    name: ClassVar[str] = "adaptive"
    examples: ClassVar[tuple[str, ...]] = (
        "adaptive",
        "adaptive(error=0.1, follow_link=false)",
        "adaptive(error=0.4)",
    )
    error: Annotated[float, Bounds(above=0, most=0.5)] = 0.1
    follow_link: bool = True

    def __post_init__(self) -> None:
        check_bounds(self)

    @property
    def biased(self) -> bool:
        """True: sparse rungs leave elements out."""
        return True

    @property
    def follows_link(self) -> bool:
        """`follow_link`."""
        return self.follow_link

    def control(self, side: str = "") -> RungControl:
        """Return what decides on rungs."""
        return RungControl(self.error, _specs(), side)

    def pinned(self, rung: int) -> Codec:
        """Return what encodes messages of a rung; it leaves |x|^2 and |x - decoded|^2 in the state."""
        return Rung(_rungs()[rung])

    def init_state(self, name: str, like: Tensor, seed: int = 0, stream: int = 0) -> State:
        """The state (`like`: any shape) holds the controllers' numbers, and what was measured of the last message."""
        state = super().init_state(name, like, seed, stream)
        state.numbers |= {"energy": 0.0, "lost": -1.0, "sent": -1.0, "sent_bits": 32.0}
        state.numbers |= self.control().start(1) | self.control(BACK).start(1)
        return state

    def layout(self, numel: int) -> Layout:
        """A message begins with the number of its rung; its length depends on that."""
        return ((torch.uint8, None),)

    def compress(self, tensor: Tensor, state: State) -> Payload:
        """Encode any shape with the rung that the state's own messages ask for: where nobody else decides with it."""
        control = self.control()
        rung = control.rung(state.numbers)
        inner = self.pinned(rung).compress(tensor, state)
        lost, energy = state.numbers["lost"], state.numbers["energy"]
        control.passed(state.numbers, state.name, lost / energy if lost >= 0 and energy > 0 else None)
        head = torch.zeros(_HEAD, dtype=torch.uint8, device=tensor.device)
        head[0] = rung
        payload = self.payload([torch.cat([head, _rungs()[rung].to_bytes(inner)])], Meta.of(tensor))
        state.numbers["sent_bits"] = 8.0 * payload.n_bytes / max(tensor.numel(), 1)
        return replace(payload, chosen=inner.chosen)

    def extract(self, payload: Payload, out: Tensor | None = None) -> Tensor:
        """Decode as the message's rung does, in the payload's shape."""
        rung, inner = _opened(payload)
        return rung.extract(inner, out)

    def add_to(self, target: Tensor, payload: Payload, alpha: float = 1.0) -> None:
        """Add to `target`, any shape, as the message's rung does."""
        rung, inner = _opened(payload)
        rung.add_to(target, inner, alpha)

    def clear_sent(self, target: Tensor, payload: Payload) -> None:
        """Zero in `target`, any shape, what the message's rung sent."""
        rung, inner = _opened(payload)
        rung.clear_sent(target, inner)

    def bits_per_element(self, numel: int, state: State | None = None) -> float:
        """The last message's; without a state NaN."""
        return state.numbers["sent_bits"] if state else float("nan")


@dataclass(frozen=True)
class Rung(Codec):
    """A codec of the ladder, which measures what it leaves out.

    Attributes:
        inner: the codec.
    """

    name: ClassVar[str] = "rung"
    inner: Codec

    @property
    def biased(self) -> bool:
        """True: all rungs keep their error."""
        return True

    def layout(self, numel: int) -> Layout:
        """As the codec."""
        return self.inner.layout(numel)

    def compress(self, tensor: Tensor, state: State) -> Payload:
        """Encode x, any shape; every other message note |x|^2 as "energy" and |x - decoded|^2 as "lost" (or -1)."""
        x = flat(tensor)
        measured = state.step % MEASURED_EVERY == 0
        refuse_nonfinite_elements(x, state)
        payload = self.inner.compress(tensor, state)
        state.numbers["lost"] = -1.0
        if not isinstance(self.inner, TopK):
            state.numbers["sent"] = -1.0
        if measured:
            state.numbers |= {"energy": float(torch.dot(x, x)), "lost": _lost(self.inner, x, payload)}
        return payload

    def extract(self, payload: Payload, out: Tensor | None = None) -> Tensor:
        """Decode as the codec, in the payload's shape."""
        return self.inner.extract(payload, out)

    def add_to(self, target: Tensor, payload: Payload, alpha: float = 1.0) -> None:
        """Add to `target`, any shape, as the codec."""
        self.inner.add_to(target, payload, alpha)

    def clear_sent(self, target: Tensor, payload: Payload) -> None:
        """Zero in `target`, any shape, what the codec sent."""
        self.inner.clear_sent(target, payload)

    def to_bytes(self, payload: Payload) -> Tensor:
        """Write as the codec."""
        return self.inner.to_bytes(payload)

    def from_bytes(self, buffer: Tensor, meta: Meta) -> Payload:
        """Read a uint8 1-D buffer as the codec."""
        return self.inner.from_bytes(buffer, meta)


def _lost(codec: Codec, x: Tensor, payload: Payload) -> float:
    """Return |x - decoded|^2; of a sparse message from what was chosen alone."""
    if codec.name == _DENSE[0]:
        return 0.0
    if payload.chosen is not None:
        indices, decoded = payload.chosen
        taken = x[indices]
        rounding = taken - decoded
        return max(0.0, float(torch.dot(x, x) - torch.dot(taken, taken) + torch.dot(rounding, rounding)))
    rest = x.clone()
    codec.add_to(rest, payload, -1.0)
    return float(torch.dot(rest, rest))


def _opened(payload: Payload) -> tuple[Codec, Payload]:
    """Return a message's rung and what it encoded.

    Raises:
        ValueError: it is none of the ladder's.
    """
    (message,) = payload.tensors
    if message.numel() < _HEAD or int(message[0]) >= len(_rungs()):
        raise ValueError(f"message of {message.numel()} bytes does not begin with a rung's number")
    rung = _rungs()[int(message[0])]
    return rung, replace(rung.from_bytes(message[_HEAD:], payload.meta), chosen=payload.chosen)


@cache
def _rungs() -> tuple[Codec, ...]:
    sparse = [TopK(density, momentum=0.0, warmup_steps=0, finish_steps=0) for density in _DENSITIES]
    return (*(codec_class(name)() for name in _DENSE), *sparse)


@cache
def _specs() -> tuple[str, ...]:
    dense = [codec.name for codec in _rungs() if not isinstance(codec, TopK)]
    return (*dense, *(str(spec_of(TopK.name, TopK(density))) for density in _DENSITIES))


CODEC = Adaptive
