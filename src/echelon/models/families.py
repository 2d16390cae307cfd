"""From a model to its family's hints."""

from __future__ import annotations

import importlib
import pkgutil

from torch import nn

from echelon.core.hints import Hints
from echelon.models import hints as families


def hints_for(model: nn.Module) -> Hints | None:
    """Return what the model's family declares of its structure, or None for a model of no known family.

    No library is imported for it: a family is told by the names of the model's class and its bases.
    """
    for module in sorted(pkgutil.iter_modules(families.__path__), key=lambda each: each.name):
        found = importlib.import_module(f"{families.__name__}.{module.name}").hints(model)
        if found is not None:
            assert isinstance(found, Hints)
            return found
    return None


def class_names(model: nn.Module) -> set[str]:
    """Return `module.Class` of the model's class and all its bases."""
    return {f"{each.__module__}.{each.__qualname__}" for each in type(model).__mro__}
