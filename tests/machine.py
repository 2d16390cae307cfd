"""How fast this machine is: limits of time are of one that is as fast as most, and a slower one has more."""

from __future__ import annotations

import time
from functools import cache

_USUAL_S = 0.025  # of the processor, for a million additions in Python


@cache
def slowness() -> float:
    """Return how many times as long plain Python takes here as on a usual machine, at least 1; the least of a few."""
    return max(1.0, min(_additions_s() for _ in range(5)) / _USUAL_S)


def _additions_s() -> float:
    began_s, total = time.process_time(), 0
    for number in range(1_000_000):
        total += number
    return time.process_time() - began_s
