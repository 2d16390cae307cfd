"""Pipeline parallelism: a chain of blocks cut into stages, micro-batches sent through them by a schedule."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from echelon.parallel.pipeline.pipeline import Judge, Pipeline
    from echelon.parallel.pipeline.settings import PipelineSettings

_MODULES = {"Judge": "pipeline", "Pipeline": "pipeline", "PipelineSettings": "settings"}

__all__ = ["Judge", "Pipeline", "PipelineSettings"]


def __getattr__(name: str) -> Any:
    # torch's pipelining imports its compiler, which a run without a pipeline need not wait for.
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
