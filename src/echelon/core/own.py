"""What users name of their own: `module:name`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

from echelon.core.errors import UserError, nearest


def find_own(what: str, name: str) -> Any:
    """Return what `module:name` names; the current folder is searched too, as `python -m` does.

    Args:
        what: is said before the name when there is no such thing: `--model`.

    Raises:
        UserError: there is no such module, or nothing of that name in it. What a module itself raises comes through.
    """
    module_name, _, own_name = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise UserError(
            f"{what} {name}: there is no module {module_name!r}; write module:function, "
            "the module importable from the current folder"
        ) from error
    if not hasattr(module, own_name):
        functions = [each for each, value in vars(module).items() if callable(value) and not each.startswith("_")]
        raise UserError(
            f"{what} {name}: {module_name} has no {own_name!r}; {nearest(own_name, functions)}"
            f"it has: {', '.join(functions) or 'no functions'}"
        )
    return getattr(module, own_name)
