"""Echelon trains PyTorch models on many processes and machines, and shows what each way of doing so costs.

Everything public is imported on first use, so that `import echelon` costs nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from echelon.api import (
        Outcome,
        RunFailed,
        compare,
        evaluate,
        export,
        finetune,
        flow,
        plan,
        predict,
        report,
        resume,
        train,
    )
    from echelon.collectives.ddp import ddp_hook
    from echelon.core.errors import UserError
    from echelon.sync.own_loop import wrap

__all__ = [
    "Outcome",
    "RunFailed",
    "UserError",
    "compare",
    "ddp_hook",
    "evaluate",
    "export",
    "finetune",
    "flow",
    "plan",
    "predict",
    "report",
    "resume",
    "train",
    "wrap",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'echelon' has no attribute {name!r}")
    import importlib

    from echelon.core import errors
    from echelon.core.system import why_unsupported

    if name == "UserError":
        return errors.UserError
    if reason := why_unsupported():
        raise errors.UserError(reason)
    homes = {"ddp_hook": "echelon.collectives.ddp", "wrap": "echelon.sync.own_loop"}
    return getattr(importlib.import_module(homes.get(name, "echelon.api")), name)


def __dir__() -> list[str]:
    return __all__
