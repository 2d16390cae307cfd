"""A link's rate, from messages that grow until they take long enough."""

from __future__ import annotations

import time
from typing import cast

import pytest

from echelon.forecast.link_rates import LinkProbe
from echelon.trainer.world import World


class _Alone(LinkProbe):
    """A probe of one rank, over a link of its own."""

    def __init__(self, byte_s: float, latency_s: float) -> None:
        super().__init__(cast(World, None))
        self._link, self.sizes = (byte_s, latency_s), list[int]()

    def meet(self) -> None:
        """Wait for nobody."""

    def most(self, value: float) -> float:
        """Return its own."""
        return value

    def sent(self, n_bytes: int) -> int:
        """Take as long as the link does; a byte of framing for each that is asked for."""
        byte_s, latency_s = self._link
        self.sizes.append(n_bytes)
        time.sleep(latency_s + 2 * n_bytes * byte_s)
        return 2 * n_bytes


@pytest.mark.parametrize(
    ("byte_s", "largest", "most_asked"),
    [(4e-6, 1 << 24, 1 << 14), (2.5e-7, 1 << 24, 1 << 18), (1e-9, 1 << 18, 1 << 18), (1e-9, 100, 100)],
)
def test_sizes_grow_until_they_tell(byte_s: float, largest: int, most_asked: int) -> None:
    probe = _Alone(byte_s, latency_s=1e-3)
    found = probe._byte_s(probe.sent, largest, 1e-3)
    assert max(probe.sizes) == most_asked
    assert probe.sent_bytes == 2 * sum(probe.sizes)
    if most_asked * byte_s > 0.01:
        assert byte_s <= found < 1.5 * byte_s
