"""What users name of their own: `module:name`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from echelon.core.errors import UserError, nearest


def code_file(name: str) -> str:
    """Return the file that importing `module:name` would run, or `built-in`; nothing where there is no such module.

    Looks as `find_own` does, the current folder first, and imports nothing, packages above the module neither.
    """
    module = name.partition(":")[0]
    if module in sys.modules:
        return getattr(sys.modules[module], "__file__", None) or "built-in"
    places: Sequence[str] | None = [str(Path.cwd()), *sys.path]
    origin, parts = "", module.split(".")
    for depth in range(len(parts)):
        package = ".".join(parts[: depth + 1])
        specs = (f.find_spec(package, places) for f in sys.meta_path if places is not None)
        spec = next((s for s in specs if s is not None), None)
        if spec is None:
            return ""
        origin = spec.origin or next(iter(spec.submodule_search_locations or ()), "")
        places = spec.submodule_search_locations
    return origin


def find_own(what: str, name: str) -> Any:
    """Return what `module:name` names; the current folder is searched too, as `python -m` does.

    Args:
        what: is said before the name when there is no such thing: `--model`.

    Raises:
        UserError: there is no such module, or nothing of that name in it. What a module itself raises comes through.
    """
    module_name, _, own_name = name.partition(":")
    if not module_name or module_name.startswith("."):
        raise UserError(f"{what} {name}: write module:function, the module importable from the current folder")
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
