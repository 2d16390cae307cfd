"""All-reduce by path, with and without a codec, and the hook that lets DistributedDataParallel use it.

Importing this package does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from echelon.collectives.registry import build, names

if TYPE_CHECKING:
    from echelon.collectives.ddp import ddp_hook
    from echelon.collectives.hook import GradientHook
    from echelon.collectives.route import Route, all_reduce, open_route
    from echelon.collectives.wire import WireCount

_WITH_TORCH = {
    "GradientHook": "hook",
    "Route": "route",
    "WireCount": "wire",
    "all_reduce": "route",
    "ddp_hook": "ddp",
    "open_route": "route",
}

__all__ = ["GradientHook", "Route", "WireCount", "all_reduce", "build", "ddp_hook", "names", "open_route"]


def __getattr__(name: str) -> Any:
    if name not in _WITH_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WITH_TORCH[name]}"), name)
