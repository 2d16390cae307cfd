"""How long Python's garbage collector stops this process."""

from __future__ import annotations

import gc
import time
from types import TracebackType


class GarbageClock:
    """Adds up the seconds of garbage collections inside its `with`; they are part of whatever phase they fall in.

    What was made before is frozen meanwhile. CPython collects its oldest generation once a quarter of it is new: beside
    half a million objects of imported libraries, cyclic garbage of training would pile up for hours.

    Attributes:
        seconds: so far.
        collections: how many there were.
    """

    def __init__(self, freezes: bool = True, thaws: bool = True) -> None:
        """Count from zero.

        Args:
            freezes: False where this process has frozen what it keeps, and may have to collect what it made since.
            thaws: this process may go on with something else, for which all is as before: what is frozen already stays
                so, and nothing more is frozen then, for nothing could be let go alone. To find that out takes as long
                as a small step.
        """
        self._freezes, self._thaws = freezes, freezes and thaws
        self.seconds = 0.0
        self.collections = 0
        self._began_s: float | None = None

    def __enter__(self) -> GarbageClock:
        if self._thaws and gc.get_freeze_count():
            self._freezes = self._thaws = False
        if self._freezes:
            gc.freeze()
        gc.collect()  # of nothing, so that the collector counts from here
        gc.callbacks.append(self._called)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        gc.callbacks.remove(self._called)
        if self._thaws:
            gc.unfreeze()

    def _called(self, moment: str, info: dict[str, int]) -> None:
        if moment == "start":
            self._began_s = time.perf_counter()
        elif self._began_s is not None:
            self.seconds += time.perf_counter() - self._began_s
            self.collections += 1
            self._began_s = None
