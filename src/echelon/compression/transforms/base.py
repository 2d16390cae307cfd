"""The interface of a transform, and what all wrappers of a codec have in common.

As in optax, a transform is two functions and the memories that they share: `before` turns the gradient into what is to
be encoded, `after` learns what of it was sent. A gradient passes on as terms, whose weighted sum is made once, by the
error memory where there is one: no transform costs a pass over memory of its own.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from echelon.compression.base import Codec, Meta, Payload, State, Terms, working_dtype
from echelon.compression.rungs import RungControl
from echelon.compression.wire import Layout


def weighted_sum(terms: Terms) -> Tensor:
    """Return the sum [numel] of terms; of one alone its own tensor, not a copy."""
    (first, _), *others = terms
    for term, weight in others:
        first = torch.add(first, term, alpha=weight)
    return first


class SentTensor(Protocol):
    """What a message carried of the tensor that was to be encoded.

    Attributes:
        sparse: so little is sent that what is remembered of it should be forgotten (`Codec.mask_below`).
    """

    @property
    def sparse(self) -> bool:
        """Whether the message's density is below the codec's `mask_below`."""

    def subtract_from(self, pending: Tensor) -> None:
        """Subtract what was sent from a tensor [numel], in place."""

    def clear(self, memory: Tensor) -> None:
        """Zero a tensor [numel] where a value was sent, in place."""


@dataclass(frozen=True)
class SentPayload:
    """A payload that this worker has encoded."""

    codec: Codec
    payload: Payload
    sparse: bool

    def subtract_from(self, pending: Tensor) -> None:
        """Subtract the decoded payload from a tensor [numel], in place."""
        self.codec.add_to(pending, self.payload, alpha=-1.0)

    def clear(self, memory: Tensor) -> None:
        """Zero a tensor [numel] where the payload carries a value."""
        self.codec.clear_sent(memory, self.payload)


@dataclass(frozen=True)
class SentMean:
    """What `Codec.reduce_rounds` gave: the mean over the workers."""

    codec: Codec
    mean: Tensor
    state: State
    sparse: bool

    def subtract_from(self, pending: Tensor) -> None:
        """Subtract what of the workers' tensors was summed from a tensor [numel], in place."""
        self.codec.subtract_reduced(pending, self.mean, self.state)

    def clear(self, memory: Tensor) -> None:
        """Zero a tensor [numel] where values were summed."""
        self.codec.clear_reduced(memory, self.state)


@dataclass(frozen=True)
class SentTogether:
    """What several messages carried of the tensors that were to be encoded.

    Attributes:
        each: of each tensor by itself.
        subtract_from: subtracts what was sent from these tensors, [numel] each, in place.
    """

    each: Sequence[SentTensor]
    subtract_from: Callable[[Sequence[Tensor]], None]


class Transform(ABC):
    """What happens to a worker's tensor around its encoding. Subclasses are frozen dataclasses of their settings."""

    keeps: ClassVar[str | None] = None
    """Key of the `State.elementwise` tensor [numel] that it keeps; None: it keeps nothing."""

    def init_memory(self, state: State, like: Tensor) -> None:
        """Begin what it keeps of a tensor like `like`, any shape, with zeros."""
        if self.keeps is not None:
            state.elementwise[self.keeps] = like.new_zeros(like.numel(), dtype=working_dtype(like.dtype))

    @abstractmethod
    def before(self, terms: Terms, state: State) -> Terms:
        """Return what is to be encoded instead; changes its own memory only."""

    def after(self, pending: Tensor, sent: SentTensor, state: State) -> None:  # noqa: B027 (most keep nothing)
        """Learn what of the encoded tensor `pending` [numel] was sent."""

    def before_together(self, terms: Sequence[Terms], states: Sequence[State]) -> list[Terms]:
        """Do what `before` does with each of several tensors."""
        return [self.before(each, state) for each, state in zip(terms, states, strict=True)]

    def after_together(self, pending: Sequence[Tensor], sent: SentTogether, states: Sequence[State]) -> None:
        """Do what `after` does with each of several tensors [numel]."""
        for tensor, each, state in zip(pending, sent.each, states, strict=True):
            self.after(tensor, each, state)


class Wrapper(Codec):
    """A codec that answers as the codec inside does; a frozen dataclass with the field `inner`."""

    inner: Codec

    def __post_init__(self) -> None:
        for attribute in ("name", "linear", "shaped", "momentum_inside", "mask_below"):
            object.__setattr__(self, attribute, getattr(self.inner, attribute))

    @property
    def biased(self) -> bool:
        """As the codec inside."""
        return self.inner.biased

    @property
    def direction(self) -> bool:
        """As the codec inside."""
        return self.inner.direction

    @property
    def absorbs_momentum(self) -> float | None:
        """As the codec inside."""
        return self.inner.absorbs_momentum

    @property
    def looks_ahead(self) -> bool:
        """As the codec inside."""
        return self.inner.looks_ahead

    @property
    def in_gradient_units(self) -> bool:
        """Whether the wrapped codec's is."""
        return self.inner.in_gradient_units

    @property
    def local_clip(self) -> float:
        """As the codec inside."""
        return self.inner.local_clip

    @property
    def takes_entropy_coding(self) -> bool:
        """As the codec inside."""
        return self.inner.takes_entropy_coding

    def init_state(self, name: str, like: Tensor, seed: int = 0, stream: int = 0) -> State:
        """Return the state of the codec inside for a tensor like `like`, any shape."""
        return self.inner.init_state(name, like, seed, stream)

    def control(self, side: str = "") -> RungControl | None:
        """Return the controller of the codec inside."""
        return self.inner.control(side)

    def layout(self, numel: int) -> Layout:
        """Return the layout of the codec inside."""
        return self.inner.layout(numel)

    def extract(self, payload: Payload, out: Tensor | None = None) -> Tensor:
        """Decode as the codec inside does, in the payload's shape."""
        return self.inner.extract(payload, out)

    def add_to(self, target: Tensor, payload: Payload, alpha: float = 1.0) -> None:
        """Add to `target`, any shape, as the codec inside does."""
        self.inner.add_to(target, payload, alpha)

    def extract_together(self, payloads: Sequence[Payload], outs: Sequence[Tensor]) -> None:
        """Decode as the codec inside does."""
        self.inner.extract_together(payloads, outs)

    def add_together(self, target: Tensor, payloads: Sequence[Payload]) -> None:
        """Add to `target`, any shape, as the codec inside does."""
        self.inner.add_together(target, payloads)

    def clear_sent(self, target: Tensor, payload: Payload) -> None:
        """Zero in `target`, any shape, what the codec inside sent."""
        self.inner.clear_sent(target, payload)

    def bits_per_element(self, numel: int, state: State | None = None) -> float:
        """Predict as the codec inside does."""
        return self.inner.bits_per_element(numel, state)

    def share_sent(self, state: State) -> float:
        """Return the share that the codec inside sends."""
        return self.inner.share_sent(state)

    def planes(self, payload: Payload) -> tuple[Tensor, ...]:
        """Return the symbols of the codec inside."""
        return self.inner.planes(payload)

    def from_planes(self, planes: tuple[Tensor, ...], meta: Meta) -> Payload:
        """Undo `planes`, uint8 1-D each."""
        return self.inner.from_planes(planes, meta)
