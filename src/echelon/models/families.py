"""From a model to its family's hints."""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import replace

from torch import nn

from echelon.core.hints import Hints
from echelon.models import hints as families

LIBRARIES = ("timm", "torchvision", "transformers")


def hints_for(model: nn.Module) -> Hints | None:
    """Return what the model's family declares of its structure, or None for a model of no known family.

    No library is imported for it: a family is told by the names of the model's class and its bases.
    """
    for module in sorted(pkgutil.iter_modules(families.__path__), key=lambda each: each.name):
        found = importlib.import_module(f"{families.__name__}.{module.name}").hints(model)
        if found is not None:
            assert isinstance(found, Hints)
            return found if _forward_is_known(model) else replace(found, chain=None)
    return None


def _forward_is_known(model: nn.Module) -> bool:
    """Whether a model's forward is the one that the hints tell of, and not one that a subclass of it has."""
    kind = type(model)
    if isinstance(getattr(model, "structure", None), Hints):
        declared = "__init__" if "structure" in vars(model) else "structure"
        return _place(kind, "forward") >= _place(kind, declared)
    return str(kind.forward.__module__).partition(".")[0] in LIBRARIES


def _place(kind: type, name: str) -> int:
    """Return which of a class and its bases, from the class on, has a name."""
    return next(i for i, each in enumerate(kind.__mro__) if name in vars(each))


def class_names(model: nn.Module) -> set[str]:
    """Return `module.Class` of the model's class and all its bases."""
    return {f"{each.__module__}.{each.__qualname__}" for each in type(model).__mro__}
