"""The states of this process's random generators, read again only when one of them has moved.

A step begins with them where it may be begun again. To read all three, some 15 KB, takes 40 microseconds in a step,
whose tensors have driven them out of the caches. Whether a Mersenne twister has moved is seen in a few bytes of its
memory: the place of the next word, and some of the words, all of which are made anew once they are used up.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from echelon.torch_compat import generator_words

_WORDS = 624
_BYTES = 4 * _WORDS
_SEEN_BYTES = 16  # of words, or of words and the place among them
_TORCH_HEAD = 24  # bytes in front of torch's words: how many are left, which is the next
_TORCH_TAIL = 24  # bytes behind them: normal numbers that are kept


class GeneratorStates(NamedTuple):
    """The states of torch's generator (of the CPU), of Python's and of numpy's, as each of them returns its own."""

    of_torch: Tensor
    of_python: tuple[Any, ...]
    of_numpy: Mapping[str, object]

    @classmethod
    def read(cls) -> GeneratorStates:
        """Read them."""
        return cls(torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False))

    def restore(self) -> None:
        """Put them back."""
        torch.set_rng_state(self.of_torch)
        random.setstate(self.of_python)
        np.random.set_state(self.of_numpy)  # type: ignore[arg-type]


class Generators:
    """Reads the states where one has moved since; a generator whose memory is not as expected is read every time."""

    def __init__(self, of_torch: bool = True) -> None:
        """Read the states; `of_torch`: torch's, too, else its present one is kept."""
        self._reads_torch = of_torch
        self._torch_parts = _torch_memory() if of_torch else ()
        self._python: Any = random.getstate.__self__  # type: ignore[attr-defined]
        self._python_place = _python_memory(self._python)
        self._numpy: object = None
        self._numpy_place = memoryview(b"")
        self._states = GeneratorStates.read()
        self._read()

    def _read(self) -> None:
        """Read the states, after what the generators' memory shows: another thread may draw in between."""
        bits = np.random.get_bit_generator()  # type: ignore[attr-defined]
        if isinstance(bits, np.random.MT19937) and bits is not self._numpy:
            self._numpy, address = bits, bits.ctypes.state_address
            self._numpy_place = _memory(address + _BYTES + 4 - _SEEN_BYTES, _SEEN_BYTES)  # the place comes last
        self._numpy_was, self._python_was = bytes(self._numpy_place), bytes(self._python_place or b"")
        self._torch_was = tuple(map(bytes, self._torch_parts or ()))
        states = GeneratorStates.read()
        self._gauss_was = states.of_python[2]
        known = self._python_place is not None and self._torch_parts is not None and bits is self._numpy
        self._sees = known and not states.of_numpy["has_gauss"]
        self._states = states if self._reads_torch else states._replace(of_torch=self._states.of_torch)

    def states(self) -> GeneratorStates:
        """Return the states: the same object until one has moved."""
        if not (
            self._sees
            and self._python_place == self._python_was
            and self._python.gauss_next == self._gauss_was
            and self._numpy_place == self._numpy_was
            and np.random.get_bit_generator() is self._numpy  # type: ignore[attr-defined]
            and self._torch_parts == self._torch_was
        ):
            self._read()
        return self._states


def _memory(address: int, size: int) -> memoryview:
    return memoryview((ctypes.c_ubyte * size).from_address(address)).cast("B")


def _python_memory(generator: Any) -> memoryview | None:
    """View the place and the first words of a generator of Python's; None: they are not as in CPython."""
    if type(generator).__basicsize__ < object.__basicsize__ + 4 + _BYTES:
        return None
    numbers = generator.getstate()[1]
    expected = np.array([numbers[-1], *numbers[:3]], np.uint32).tobytes()
    place = _memory(id(generator) + object.__basicsize__, _SEEN_BYTES)
    return place if place == expected else None


def _torch_memory() -> tuple[memoryview, ...] | None:
    """View what of torch's generator shows whether it has moved; None: it is not as expected in this version.

    Tried with a generator of our own: what moves that one must be seen.
    """
    tried = torch.Generator()
    parts = _torch_parts(tried)
    if parts is None:
        return None
    for draw in (torch.rand, torch.randn, torch.randn, torch.rand):
        for dtype in (torch.float32, torch.float64):
            before = tuple(map(bytes, parts))
            draw(1, generator=tried, dtype=dtype)
            if parts == before:
                return None
    return _torch_parts(torch.default_generator)


def _torch_parts(generator: torch.Generator) -> tuple[memoryview, ...] | None:
    address = generator_words(generator)
    if address is None:
        return None
    head = _memory(address - _TORCH_HEAD, _TORCH_HEAD + _SEEN_BYTES)
    return head, _memory(address + _BYTES, _TORCH_TAIL)
