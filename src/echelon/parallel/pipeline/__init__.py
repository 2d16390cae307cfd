"""Pipeline parallelism: a chain of blocks cut into stages, micro-batches sent through them by a schedule."""

from __future__ import annotations

from echelon.parallel.pipeline.pipeline import Judge, Pipeline
from echelon.parallel.pipeline.settings import PipelineSettings

__all__ = ["Judge", "Pipeline", "PipelineSettings"]
