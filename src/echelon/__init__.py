"""Echelon trains PyTorch models on many processes and machines, and shows what each way of doing so costs.

Everything public is imported on first use, so that `import echelon` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from echelon.api import Outcome, RunFailed, evaluate, report, resume, train
    from echelon.collectives.ddp import ddp_hook

__all__ = ["Outcome", "RunFailed", "ddp_hook", "evaluate", "report", "resume", "train"]

_HOMES = dict.fromkeys(("Outcome", "RunFailed", "evaluate", "report", "resume", "train"), "echelon.api") | {
    "ddp_hook": "echelon.collectives.ddp"
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'echelon' has no attribute {name!r}")
