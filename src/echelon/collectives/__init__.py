"""All-reduce by path, with and without a codec, and the hook that lets DistributedDataParallel use it."""

from echelon.collectives.hook import GradientHook
from echelon.collectives.wire import WireCount

__all__ = ["GradientHook", "WireCount"]
