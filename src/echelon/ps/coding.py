"""Keys as frames and back: plain, or through any codec, with error feedback on both sides.

Upward the codec's own error feedback keeps in the worker what a message left out. Downward the server keeps, per
worker, what that worker holds (`Reference`): what travels is the difference to it, so whatever a message left out is
part of the next difference. That is error feedback too, and it also keeps unbiased codecs from drifting.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from echelon.compression import Compression
from echelon.compression.base import Codec, Meta, State
from echelon.compression.transforms import without_transforms
from echelon.ps.blob import as_frame, copied_frame, read_frame, sent_frame
from echelon.ps.rows import read_rows, read_values, row_gradient, value_frame
from echelon.ps.table import KeyRange
from echelon.sync.ps import server_codec


class KeyCoding:
    """Encodes and decodes keys of one element type with one codec; None: as they are."""

    def __init__(self, codec: Codec | None, dtype: torch.dtype) -> None:
        self.codec, self.dtype = codec, dtype

    def pieces(self, key: KeyRange) -> list[tuple[int, int, tuple[int, ...]]]:
        """Return what is encoded as one tensor: the whole key, or each parameter where the codec needs its shape."""
        if self.codec is not None and self.codec.shaped:
            return [(p.start, p.stop, p.shape) for p in key.parts]
        return [(0, key.numel, (key.numel,))]

    def states(self, key: KeyRange, seed: int, stream: int) -> list[State]:
        """Return a sender's codec states for a key, before the first message."""
        if self.codec is None:
            return []
        like = [torch.empty(shape, dtype=self.dtype) for _, _, shape in self.pieces(key)]
        return [self.codec.init_state(f"key{key.index}.{i}", t, seed, stream) for i, t in enumerate(like)]

    def encode(self, flat: Tensor, key: KeyRange, states: Sequence[State]) -> list[Any]:
        """Encode a key's values, 1-D. Without a codec the frame is the tensor's own memory.

        Raises:
            NonFiniteError: the values hold NaN or infinity, and the codec cannot.
        """
        if self.codec is None:
            return [sent_frame(flat)]
        frames = []
        for (start, stop, shape), state in zip(self.pieces(key), states, strict=True):
            payload = self.codec.compress(flat[start:stop].view(shape), state)
            frames.append(as_frame(self.codec.to_bytes(payload).contiguous()))
        return frames

    def decode(self, frames: Sequence[Any], key: KeyRange) -> Tensor:
        """Decode a key's values, 1-D; may share the frame's memory.

        Raises:
            ValueError: the frames do not hold this key.
        """
        if self.codec is None:
            return self._read(frames, key)
        pieces = self.pieces(key)
        if len(frames) != len(pieces):
            raise ValueError(f"{len(frames)} frames for {len(pieces)} pieces of key {key.index}")
        flat = torch.empty(key.numel, dtype=self.dtype)
        for frame, (start, stop, shape) in zip(frames, pieces, strict=True):
            try:
                payload = self.codec.from_bytes(read_frame(frame, torch.uint8), Meta(shape, self.dtype))
                self.codec.extract(payload, out=flat[start:stop])
            except (ValueError, RuntimeError, IndexError, OverflowError) as error:
                raise ValueError(f"not a message of {self.codec.name}: {error}") from None
        return flat

    def _read(self, frames: Sequence[Any], key: KeyRange) -> Tensor:
        if len(frames) != 1:
            raise ValueError(f"{len(frames)} frames for key {key.index}, which is one")
        flat = read_frame(frames[0], self.dtype)
        if flat.numel() != key.numel:
            raise ValueError(f"{flat.numel()} elements for key {key.index} of {key.numel}")
        return flat


class RowCoding:
    """Encodes and decodes the gradients of rows, where the codec takes rows (`Codec.takes_rows`); else as they are.

    Such a codec keeps nothing, and makes of so many values a message of one length, which tells a server whether the
    values are encoded: those that the codec cannot hold travel as they are, for all to see.
    """

    def __init__(self, compression: Compression, dtype: torch.dtype) -> None:
        self.codec = compression.codec if compression.encodes and compression.codec.takes_rows else None
        self._dtype = dtype

    def encode(self, values: Tensor, state: State) -> Any:
        """Return the frame of rows' values, `(R, D)`; they must not change until it was sent.

        Args:
            state: says on what the codec's draws depend.
        """
        if self.codec is None or not values.numel():
            return value_frame(values)
        if self.codec.n_bytes(values.numel()) == values.nbytes:  # the length would not tell them apart
            return value_frame(values)
        largest = min(self.codec.largest, torch.finfo(values.dtype).max)
        if not bool((values.abs() <= largest).all()):
            return value_frame(values)
        return as_frame(self.codec.to_bytes(self.codec.compress(values.contiguous(), state)).contiguous())

    def gradient(self, frames: Sequence[Any], key: KeyRange) -> Tensor:
        """Read the sparse gradient of a key from the frames of its rows' numbers and values.

        Raises:
            ValueError: the frames hold no rows of this key.
        """
        if len(frames) != 2:
            raise ValueError(f"{len(frames)} frames for rows of key {key.index}, which are two")
        rows = read_rows(frames[0], key)
        return row_gradient(rows, self._values(frames[1], len(rows), key), key)

    def _values(self, frame: Any, count: int, key: KeyRange) -> Tensor:
        shape, plain = (count, key.width), count * key.width * self._dtype.itemsize
        coded = self.codec.n_bytes(count * key.width) if self.codec is not None and count else None
        message = read_frame(frame, torch.uint8) if coded not in (None, plain) and len(frame) else None
        if self.codec is None or message is None or message.numel() != coded:
            return read_values(frame, count, key, self._dtype)
        try:
            return self.codec.extract(self.codec.from_bytes(message, Meta(shape, self._dtype)))
        except (ValueError, RuntimeError, IndexError, OverflowError) as error:
            raise ValueError(f"not a message of {self.codec.name}: {error}") from None


class References:
    """What each worker holds of each key, on the server: differences to it travel."""

    def __init__(self, coding: KeyCoding, seed: int) -> None:
        self._coding, self._seed = coding, seed
        self._held: dict[tuple[str, int], tuple[Tensor, list[State]]] = {}

    def encode(self, worker: str, key: KeyRange, value: Tensor, full: bool, memory: Any) -> tuple[bool, list[Any]]:
        """Return whether frames hold a difference, and the frames; `full` sends the 1-D value itself and starts anew.

        `memory` is the message that the value lies in, or None: then it is copied.
        """
        held = self._held.get((worker, key.index))
        if self._coding.codec is None or held is None or full:
            if self._coding.codec is not None:
                self._held[worker, key.index] = (value.clone(), self._coding.states(key, self._seed, 0))
            return False, [copied_frame(value) if memory is None else memory]
        reference, states = held
        frames = self._coding.encode(value - reference, key, states)
        reference += self._coding.decode(frames, key)
        return True, frames

    def forget(self, worker: str) -> None:
        """Drop what is kept for a worker that is gone."""
        for held in [held for held in self._held if held[0] == worker]:
            del self._held[held]


def upward(compression: Compression, dtype: torch.dtype) -> KeyCoding:
    """Build the coding of gradients.

    Raises:
        UserError: the codec cannot serve a server.
    """
    return KeyCoding(server_codec(compression), dtype)


def downward(compression: Compression, dtype: torch.dtype) -> KeyCoding:
    """Build the coding of parameters on their way back: the same codec without feedback, which `References` is."""
    codec = upward(compression, dtype).codec
    return KeyCoding(None if codec is None else without_transforms(codec.relay()), dtype)
