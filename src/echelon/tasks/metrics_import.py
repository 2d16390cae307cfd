"""Imports torchmetrics, for fork server and commands, without what the metrics of our tasks never use of it.

`scipy.signal` takes as long as half of torch: torchmetrics gives that module a function that newer versions of it
lack, for another library. `torchvision`, which imports torch's compiler, and `transformers`, where it is installed,
take as long again, for what quality of images, BERTScore and their like name. Placeholders stand for them while
torchmetrics is imported; what they name imports the true one when it is used. This is work at import, and meant to be:
the fork server imports, and runs nothing else of ours.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import ModuleType
from typing import Any

_LATER = ("transformers", "torchvision", "torchvision.models", "torchvision.ops")
_UNUSED = "scipy.signal"


class _Later(type):
    """The type of a class that stands for a name of a module, `__module__`, which is imported when it is used."""

    def true_one(cls) -> Any:
        """Return the class, function or module that it stands for."""
        return getattr(importlib.import_module(cls.__module__), cls.__name__)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):  # of what looks at classes, not of what uses this one
            raise AttributeError(name)
        return getattr(cls.true_one(), name)

    def __call__(cls, *args: Any, **keywords: Any) -> Any:
        return cls.true_one()(*args, **keywords)

    def __instancecheck__(cls, instance: object) -> bool:
        return cls.__module__ in sys.modules and isinstance(instance, cls.true_one())


class _Placeholder(ModuleType):
    """Stands for a module of which anything can be named."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Later(name, (), {"__module__": self.__name__})


@contextmanager
def _standing_in(placeholder: ModuleType) -> Iterator[None]:
    """Let a module be the placeholder inside, unless it is imported already."""
    name = placeholder.__name__
    if name in sys.modules:
        yield
        return
    sys.modules[name] = placeholder
    try:
        yield
    finally:
        del sys.modules[name]


def _import_metrics() -> None:
    if "torchmetrics" in sys.modules:
        return
    signals = ModuleType(_UNUSED)
    signals.hamming = None  # type: ignore[attr-defined]
    with ExitStack() as stack:
        for placeholder in (signals, *map(_Placeholder, _LATER)):
            stack.enter_context(_standing_in(placeholder))
        importlib.import_module("torchmetrics.classification")
    scipy = sys.modules.get("scipy")
    if scipy is not None and vars(scipy).get("signal") is signals:
        del scipy.signal


_import_metrics()
