"""How long a hook's communication takes in all, so that what backward hides of it can be told from what it does not."""

from __future__ import annotations

import time


class ReduceTimes:
    """Adds up, over the backward passes of one rank, when buckets were handed over and when they came back reduced.

    Buckets come back in the order in which they were handed over, so the time in which at least one is under way is
    the sum over buckets of done - max(handed over, done of the one before).

    Attributes:
        busy_s: seconds in which a bucket was under way: coding, waiting for other ranks, the network.
        spread_s: seconds from the first bucket of a backward pass to its last one: what can be hidden behind.
    """

    def __init__(self) -> None:
        self.busy_s = 0.0
        self.spread_s = 0.0
        self._first_s = 0.0
        self._done_s = 0.0

    def handed(self, first: bool, last: bool) -> float:
        """Note that backward hands over a bucket; returns the moment, for `done`."""
        now = time.perf_counter()
        if first:
            self._first_s = now
        if last:
            self.spread_s += now - self._first_s
        return now

    def done(self, handed_s: float) -> None:
        """Note that a bucket is reduced; called on whichever thread sees it."""
        now = time.perf_counter()
        self.busy_s += max(0.0, now - max(handed_s, self._done_s))
        self._done_s = now
