"""What the sparse codecs share: chosen indices, packed, and their values."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from echelon.compression import bits
from echelon.compression.base import Codec, Meta, Payload, State, empty, flat
from echelon.compression.bits import index_bytes, pack_indices, unpack_indices
from echelon.compression.selection import gather, scatter
from echelon.compression.wire import Layout, packed_bytes

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
        head = [torch.tensor([indices.numel()], device=x.device)] if self.count(x.numel()) is None else []
        chosen = gather(x, indices)
        state.numbers |= {"step": state.step + 1, "sent": indices.numel() / max(x.numel(), 1)}
        values, decoded = self._pack_values(chosen)
        payload = self.payload([*head, pack_indices(indices, x.numel()), *values], Meta.of(tensor))
        return replace(payload, chosen=(indices, decoded))

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
        tensors = list(payload.tensors)
        numel = payload.meta.numel
        count = self.count(numel)
        if count is None:
            count = int(tensors.pop(0))
            if not 0 <= count <= numel:
                raise ValueError(f"message says {count} of {numel} elements")
        packed, *values = tensors
        indices = unpack_indices(packed, numel, count)
        if self.values == "sign":
            mean, signs = values
            if signs.numel() != bits.packed_size(count):
                raise ValueError(f"message holds {signs.numel()} bytes of signs for {count} elements")
            return indices, (bits.unpack_bits(signs, count).float() * 2 - 1) * mean
        if values[0].numel() != count:
            raise ValueError(f"message holds {values[0].numel()} values for {count} indices")
        return indices, values[0].float()

    def extract(self, payload: Payload, out: Tensor | None = None) -> Tensor:
        """Write the values at their indices of a tensor of zeros, of the payload's shape."""
        indices, values = self.chosen(payload)
        meta = payload.meta
        if out is None:
            out = empty(meta.numel, meta.dtype, values.device).view(meta.shape)
        out.zero_()
        scatter(out.view(-1), indices, values)
        return out

    def add_to(self, target: Tensor, payload: Payload, alpha: float = 1.0) -> None:
        """Add `alpha` times the values at their indices of `target`, any shape, in place."""
        indices, values = self.chosen(payload)
        # Indices are distinct: reading, adding and writing back is index_add_ without its slow, ordered loop.
        view = target.view(-1)
        scatter(view, indices, gather(view, indices).add_(values.to(view.dtype), alpha=alpha))

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
