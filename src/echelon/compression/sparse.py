"""What the sparse codecs share: chosen indices, packed, and their values."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from echelon.compression import bits
from echelon.compression.base import Codec, Meta, Payload, State, empty, flat
from echelon.compression.bits import (
    index_bytes,
    pack_indices,
    pack_indices_together,
    unpack_indices,
    unpack_indices_together,
)
from echelon.compression.native import kernels_for
from echelon.compression.selection import gather, scatter
from echelon.compression.wire import Layout, packed_bytes, unpack_together

_FLOATS = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Sparse(Codec):
    """A codec that sends some elements: their count where it varies, packed indices, values.

    Values travel as `bf16` or `fp32`, or as `sign`: one bit each and the mean magnitude of all that are sent. What
    rounding takes from them is left to error feedback, like what was not chosen.
    """

    values: str

    def init_state(self, name: str, like: Tensor, seed: int = 0, stream: int = 0) -> State:
        """The state's "sent" is the share of `like` (any shape) that the last message carried; -1 before the first."""
        state = super().init_state(name, like, seed, stream)
        state.numbers["sent"] = -1.0
        return state

    @property
    def biased(self) -> bool:
        """True: what is not chosen is left out."""
        return True

    @abstractmethod
    def count(self, numel: int) -> int | None:
        """Number of elements that are sent; None where it depends on values or on the step."""

    @abstractmethod
    def choose(self, x: Tensor, state: State) -> Tensor:
        """Return the indices to send of x [n]: ascending, int64. Raises NonFiniteError."""

    def choose_together(self, tensors: Sequence[Tensor], states: Sequence[State]) -> list[Tensor]:
        """Do what `choose` does to each of several tensors [numel]."""
        return [self.choose(x, state) for x, state in zip(tensors, states, strict=True)]

    def layout(self, numel: int) -> Layout:
        """Return the count where it varies, the packed indices, and the values."""
        count = self.count(numel)
        head: Layout = ((torch.int64, 1),) if count is None else ()
        indices: Layout = ((torch.uint8, None if count is None else index_bytes(numel, count)),)
        return head + indices + self._value_layout(count)

    def _value_layout(self, count: int | None) -> Layout:
        if self.values == "sign":
            return ((torch.float32, 1), (torch.uint8, None if count is None else bits.packed_size(count)))
        return ((_FLOATS[self.values], count),)

    def compress(self, tensor: Tensor, state: State) -> Payload:
        """Choose elements of a tensor of any shape, and pack their indices and values."""
        x = flat(tensor)
        indices = self.choose(x, state)
        coded = self._pack_values(gather(x, indices))
        return self._packed(tensor, state, (indices, pack_indices(indices, x.numel())), coded)

    def compress_together(self, tensors: Sequence[Tensor], states: Sequence[State]) -> list[Payload]:
        """Do what `compress` does to each of several tensors, of any shape, in few launches."""
        flats = [flat(tensor) for tensor in tensors]
        chosen = self.choose_together(flats, states)
        coded = self._pack_values_together([gather(x, indices) for x, indices in zip(flats, chosen, strict=True)])
        packed = pack_indices_together(chosen, [x.numel() for x in flats])
        indices = zip(chosen, packed, strict=True)
        return [self._packed(*each) for each in zip(tensors, states, indices, coded, strict=True)]

    def _packed(
        self, tensor: Tensor, state: State, indices: tuple[Tensor, Tensor], coded: tuple[list[Tensor], Tensor]
    ) -> Payload:
        """Build a tensor's payload of its indices, plain and packed, and of its values, coded and decoded; count it."""
        count, numel = indices[0].numel(), tensor.numel()
        head = [torch.full((1,), count, device=tensor.device)] if self.count(numel) is None else []
        state.numbers |= {"step": state.step + 1, "sent": count / max(numel, 1)}
        payload = self.payload([*head, indices[1], *coded[0]], Meta.of(tensor))
        return replace(payload, chosen=(indices[0], coded[1]))

    def _pack_values_together(self, chosen: Sequence[Tensor]) -> list[tuple[list[Tensor], Tensor]]:
        if self.values == "sign":  # each part has a mean of its own
            return [self._pack_values(part) for part in chosen]
        counts = [part.numel() for part in chosen]
        (short,), decoded = self._pack_values(torch.cat(list(chosen)))
        return [([few], part) for few, part in zip(short.split(counts), decoded.split(counts), strict=True)]

    def _pack_values(self, chosen: Tensor) -> tuple[list[Tensor], Tensor]:
        """Return the values as they travel, and as they will be decoded (float32)."""
        if self.values == "sign":
            mean = (chosen.abs().sum(dtype=torch.float64) / max(chosen.numel(), 1)).float().view(1)
            positive = chosen >= 0
            return [mean, bits.pack_bits(positive)], (positive.float() * 2 - 1) * mean
        form = _FLOATS[self.values]
        largest = torch.finfo(form).max  # the largest floats would be rounded to infinity, which feedback never forgets
        short = chosen.clamp(-largest, largest).to(form)
        return [short], short.float()

    def chosen(self, payload: Payload) -> tuple[Tensor, Tensor]:
        """Return the indices and the float32 values that a payload carries.

        Raises:
            ValueError: a damaged message.
        """
        if payload.chosen is not None:
            return payload.chosen
        numel, count = payload.meta.numel, self.count(payload.meta.numel)
        tensors = list(payload.tensors)
        if count is None:
            count = int(tensors.pop(0))
        self._check_counts(numel, count, tensors)
        return unpack_indices(tensors[0], numel, count), self._values(tensors[1:], count)

    def _check_counts(self, numel: int, count: int, tensors: Sequence[Tensor]) -> None:
        """Raise ValueError if packed indices and values cannot be those of `count` of `numel` elements."""
        if not 0 <= count <= numel:
            raise ValueError(f"message says {count} of {numel} elements")
        wanted = bits.packed_size(count) if self.values == "sign" else count
        if tensors[-1].numel() != wanted:
            raise ValueError(f"message holds {tensors[-1].numel()} values for {count} indices")

    def _values(self, coded: Sequence[Tensor], count: int) -> Tensor:
        if self.values == "sign":
            mean, signs = coded
            return (bits.unpack_bits(signs, count).float() * 2 - 1) * mean
        return coded[0].float()

    def chosen_together(self, payloads: Sequence[Payload]) -> list[tuple[Tensor, Tensor]]:
        """Do what `chosen` does to each of several payloads, in few launches.

        Raises:
            ValueError: a damaged message.
        """
        known = [payload.chosen for payload in payloads]
        if any(each is not None for each in known):
            return [self.chosen(payload) for payload in payloads]
        sizes = [payload.meta.numel for payload in payloads]
        fixed = [count for count in map(self.count, sizes) if count is not None]
        tensors = [payload.tensors[0 if fixed else 1 :] for payload in payloads]
        counts = fixed or torch.cat([payload.tensors[0] for payload in payloads]).tolist()
        for numel, count, each in zip(sizes, counts, tensors, strict=True):
            self._check_counts(numel, count, each)
        indices = unpack_indices_together([each[0] for each in tensors], sizes, counts)
        if self.values == "sign":
            values = [self._values(each[1:], count) for each, count in zip(tensors, counts, strict=True)]
        else:
            values = list(torch.cat([each[1] for each in tensors]).float().split(counts))
        return list(zip(indices, values, strict=True))

    def from_bytes_together(self, buffers: Sequence[Tensor], metas: Sequence[Meta]) -> list[Payload]:
        """Do what `from_bytes` does to each of several buffers; their heads are read together."""
        tensors = unpack_together(buffers, [self.layout(meta.numel) for meta in metas])
        return [self.payload(each, meta) for each, meta in zip(tensors, metas, strict=True)]

    def extract(self, payload: Payload, out: Tensor | None = None) -> Tensor:
        """Write the values at their indices of a tensor of zeros, of the payload's shape."""
        indices, values = self.chosen(payload)
        meta = payload.meta
        if out is None:
            out = empty(meta.numel, meta.dtype, values.device).view(meta.shape)
        out.zero_()
        scatter(out.view(-1), indices, values)
        return out

    def extract_together(self, payloads: Sequence[Payload], outs: Sequence[Tensor]) -> None:
        """Do what `extract` does to each of several payloads and tensors, in few launches."""
        for out, (indices, values) in zip(outs, self.chosen_together(payloads), strict=True):
            scatter(out.zero_().view(-1), indices, values)

    def add_together(self, target: Tensor, payloads: Sequence[Payload]) -> None:
        """Do what `add_to` does with each of several payloads, in few launches."""
        for indices, values in self.chosen_together(payloads):
            _add(target.view(-1), indices, values, 1.0)

    def subtract_together(self, targets: Sequence[Tensor], payloads: Sequence[Payload]) -> None:
        """Subtract the values from their own tensors, [numel] each, in place."""
        for target, (indices, values) in zip(targets, self.chosen_together(payloads), strict=True):
            _add(target, indices, values, -1.0)

    def add_to(self, target: Tensor, payload: Payload, alpha: float = 1.0) -> None:
        """Add `alpha` times the values at their indices of `target`, any shape, in place."""
        indices, values = self.chosen(payload)
        _add(target.view(-1), indices, values, alpha)

    def clear_sent(self, target: Tensor, payload: Payload) -> None:
        """Zero `target`, any shape, at the indices that the payload carries."""
        indices, values = self.chosen(payload)
        scatter(target.view(-1), indices, torch.zeros_like(values))

    def bits_for(self, numel: int, count: int) -> float:
        """Bits per element of a message that carries `count` of `numel` elements, with lengths and padding."""
        layout: Layout = ((torch.uint8, index_bytes(numel, count)), *self._value_layout(count))
        if self.count(numel) is None:  # as many lengths in front as there are tensors, the count among these
            layout = ((torch.int64, len(layout) + 2), *layout)
        return 8 * (packed_bytes(layout) or 0) / max(numel, 1)

    def planes(self, payload: Payload) -> tuple[Tensor, ...]:
        """Two-byte values are cut into low and high bytes: signs and exponents repeat, fractions do not."""
        planes: list[Tensor] = []
        for tensor in payload.tensors:
            raw = tensor.view(torch.uint8)
            if tensor.dtype == torch.uint8 or tensor.dtype == torch.int64:
                planes.append(raw)
            else:
                width = tensor.dtype.itemsize
                planes += [raw[byte::width].contiguous() for byte in range(width)]
        return tuple(planes)

    def from_planes(self, planes: tuple[Tensor, ...], meta: Meta) -> Payload:
        """Build the payload from uint8 1-D planes, values of several bytes put together again."""
        rest, tensors = list(planes), []
        for dtype, _ in self.layout(meta.numel):
            if dtype in (torch.uint8, torch.int64):
                tensors.append(rest.pop(0).view(dtype))
            else:
                pieces, rest = rest[: dtype.itemsize], rest[dtype.itemsize :]
                tensors.append(torch.stack(pieces, dim=1).view(-1).view(dtype))
        return self.payload(tensors, meta)


def _add(target: Tensor, indices: Tensor, values: Tensor, alpha: float) -> None:
    """Add `alpha` times values at distinct indices of a 1-D tensor, in place."""
    if (kernels := kernels_for(target, values)) is not None and abs(alpha) == 1:
        kernels.add_at(target, indices, values, alpha)
    elif target.device.type == "cpu":  # what index_add_ does, without its slow, ordered loop
        scatter(target, indices, gather(target, indices).add_(values.to(target.dtype), alpha=alpha))
    else:
        target.index_add_(0, indices, values.to(target.dtype), alpha=alpha)


def count_for(density: float, numel: int) -> int:
    """Elements that a density sends of `numel`: at least one of a tensor that has any."""
    return min(numel, max(1, math.floor(density * numel + 0.5))) if numel else 0


def share_carried(states: Iterable[tuple[State, int]]) -> float | None:
    """Return the share of elements that the last messages carried; None where no sparse codec has sent any.

    Args:
        states: of senders, each with the elements that it stands for.
    """
    carried = elements = 0.0
    for state, numel in states:
        share = state.numbers.get("sent", -1.0)
        if share >= 0:
            carried, elements = carried + share * numel, elements + numel
    return carried / elements if elements else None
