"""SIGTERM and Ctrl-C as a flag that the loop reads between steps."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopFlag:
    """Set once a signal asked this process to stop."""

    def __init__(self) -> None:
        self.signum = 0

    def __bool__(self) -> bool:
        return self.signum != 0

    def _set(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum


@contextmanager
def stop_on_signals() -> Iterator[StopFlag]:
    """Turn SIGTERM and SIGINT into a flag while the block runs; the former handlers come back after it."""
    flag = StopFlag()
    former = {s: signal.signal(s, flag._set) for s in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield flag
    finally:
        for signum, handler in former.items():
            signal.signal(signum, handler)
