"""What entropy coding costs here, and what it saves: seconds as measured in this process."""

from __future__ import annotations

from collections import deque
from statistics import median

_KEPT = 31
_LEAST = 1024
"""Shorter streams and messages measure the call, not the pace."""


class Pace:
    """Seconds per symbol to encode and to decode, seconds per byte to send: the median of the last measurements.

    A byte's seconds are those for which a message's sender and receiver were busy with it, waiting for each other
    included: what a shorter message would have saved. Until all three are known nobody can say whether coding pays.
    """

    def __init__(self) -> None:
        self._encode: deque[float] = deque(maxlen=_KEPT)
        self._decode: deque[float] = deque(maxlen=_KEPT)
        self._send: deque[float] = deque(maxlen=_KEPT)

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
    if count >= _LEAST and seconds > 0:
        side.append(seconds / count)
