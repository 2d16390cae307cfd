"""Error feedback: what a codec leaves out is kept and sent later. One wrapper for all codecs that need it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from echelon.compression.base import (
    Codec,
    Meta,
    Payload,
    Rounds,
    State,
    flat,
    refuse_nonfinite_elements,
    working_dtype,
)
from echelon.compression.wire import Layout

StateDict = dict[str, Tensor | float]


@dataclass(frozen=True)
class ErrorFeedback(Codec):
    """Around a codec C: p = g + e, send C(p), keep e = p - decode(C(p)).

    With momentum m in the worker (DGC's momentum correction): u = m u + g, p = u + e, or p = g + m u + e where the
    codec looks ahead (Nesterov's form). Where a sparse message carries a value, u is zeroed too (momentum factor
    masking), once the density is below the codec's `mask_below`. With clipping, g is first scaled down to the
    Euclidean norm `local_clip`. Memories: "error" (e) and "velocity" (u), one value per element.

    Attributes:
        inner: the codec.
        worker: apply the inner codec's momentum and clipping; false on the way back of an all-reduce.

    Papers: Karimireddy et al. 2019, arXiv:1901.09847; Lin et al. 2018, arXiv:1712.01887 (momentum correction).
    """

    name: ClassVar[str] = "error_feedback"
    inner: Codec
    worker: bool = True

    def __post_init__(self) -> None:
        for attribute in ("name", "linear", "shaped", "momentum_inside"):
            object.__setattr__(self, attribute, getattr(self.inner, attribute))

    @property
    def biased(self) -> bool:
        return self.inner.biased

    @property
    def direction(self) -> bool:
        return self.inner.direction

    @property
    def absorbs_momentum(self) -> float | None:
        return self.inner.absorbs_momentum if self.worker else None

    @property
    def looks_ahead(self) -> bool:
        return self.worker and self.inner.looks_ahead

    @property
    def local_clip(self) -> float:
        return self.inner.local_clip if self.worker else 0.0

    @property
    def takes_entropy_coding(self) -> bool:
        return self.inner.takes_entropy_coding

    def relay(self) -> Codec:
        inner = self.inner.relay()
        return ErrorFeedback(inner, worker=False) if inner.biased else inner

    def init_state(self, name: str, like: Tensor, seed: int = 0, stream: int = 0) -> State:
        state = self.inner.init_state(name, like, seed, stream)
        for memory, wanted in (("error", self.biased), ("velocity", bool(self.absorbs_momentum))):
            if wanted:
                dtype = working_dtype(like.dtype)
                state.memory[memory] = torch.zeros(like.numel(), dtype=dtype, device=like.device)
        return state

    def compress(self, tensor: Tensor, state: State) -> Payload:
        pending = self._pending(tensor, state)
        masked = self.inner.share_sent(state) < self.inner.mask_below
        payload = self.inner.compress(pending.view(tensor.shape), state)
        if self.biased:
            self.inner.add_to(pending, payload, alpha=-1.0)
        if masked and "velocity" in state.memory:
            self.inner.clear_sent(state.memory["velocity"], payload)
        return replace(payload, meta=Meta.of(tensor), chosen=None)

    def reduce_rounds(self, tensor: Tensor, state: State) -> Rounds:
        masked = self.inner.share_sent(state) < self.inner.mask_below
        pending = self._pending(tensor, state)
        mean = yield from self.inner.reduce_rounds(pending.view(tensor.shape), state)
        if self.biased:
            self.inner.subtract_reduced(pending, mean, state)
        if masked and "velocity" in state.memory:
            self.inner.clear_reduced(state.memory["velocity"], state)
        return mean.to(tensor.dtype)

    def _pending(self, tensor: Tensor, state: State) -> Tensor:
        """Return what is to be sent, p, in the error memory itself where there is one. Checks before it writes."""
        gradient = flat(tensor)
        refuse_nonfinite_elements(gradient, state)
        if self.local_clip:
            norm = torch.linalg.vector_norm(gradient)
            gradient = gradient * torch.clamp(self.local_clip / norm.clamp_min(1e-30), max=1.0)
        momentum = self.absorbs_momentum
        velocity = state.memory["velocity"].mul_(momentum).add_(gradient) if momentum else gradient
        if not (momentum and self.looks_ahead):
            return state.memory["error"].add_(velocity) if self.biased else velocity
        if not self.biased:
            return torch.add(gradient, velocity, alpha=momentum)
        return state.memory["error"].add_(gradient).add_(velocity, alpha=momentum)

    def layout(self, numel: int) -> Layout:
        return self.inner.layout(numel)

    def extract(self, payload: Payload, out: Tensor | None = None) -> Tensor:
        return self.inner.extract(payload, out)

    def add_to(self, target: Tensor, payload: Payload, alpha: float = 1.0) -> None:
        self.inner.add_to(target, payload, alpha)

    def clear_sent(self, target: Tensor, payload: Payload) -> None:
        self.inner.clear_sent(target, payload)

    def bits_per_element(self, numel: int, state: State | None = None) -> float:
        return self.inner.bits_per_element(numel, state)

    def share_sent(self, state: State) -> float:
        return self.inner.share_sent(state)

    def planes(self, payload: Payload) -> tuple[Tensor, ...]:
        return self.inner.planes(payload)

    def from_planes(self, planes: tuple[Tensor, ...], meta: Meta) -> Payload:
        return self.inner.from_planes(planes, meta)


def resize(states: Sequence[StateDict], workers: int) -> list[StateDict]:
    """Share out one tensor's states over another number of workers; the sum of each memory over workers is kept.

    Args:
        states: each old worker's `State.state_dict()` of the tensor.
        workers: how many there are now.

    Returns:
        each new worker's state: memories are sum / workers (the first one's makes up for rounding), everything else is
        the first old worker's, which steps, thresholds and factors share or adapt again.
    """
    shared: list[StateDict] = [
        {k: v.clone() if isinstance(v, Tensor) else v for k, v in states[0].items()} for _ in range(workers)
    ]
    for key, first in states[0].items():
        if not key.startswith("memory.") or not isinstance(first, Tensor):
            continue
        total = torch.stack([torch.as_tensor(state[key]).double() for state in states]).sum(dim=0)
        part = (total / workers).to(first.dtype)
        for new in shared[1:]:
            new[key] = part.clone()
        shared[0][key] = (total - part.double() * (workers - 1)).to(first.dtype)
    return shared
