"""Imports torchmetrics without `scipy.signal`, which takes as long as half of torch, for the fork server.

torchmetrics imports that module to give it a function that newer versions of it lack, for another library, and uses it
nowhere in the metrics that tasks take. While it is imported a placeholder has that function already. This is work at
import, and meant to be: the fork server runs nothing else of ours.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

_UNUSED = "scipy.signal"


def _import_metrics() -> None:
    if _UNUSED in sys.modules or "torchmetrics" in sys.modules:
        return
    placeholder = ModuleType(_UNUSED)
    placeholder.hamming = None  # type: ignore[attr-defined]
    sys.modules[_UNUSED] = placeholder
    try:
        importlib.import_module("torchmetrics.classification")
    finally:
        del sys.modules[_UNUSED]
        scipy = sys.modules.get("scipy")
        if scipy is not None and vars(scipy).get("signal") is placeholder:
            del scipy.signal


_import_metrics()
