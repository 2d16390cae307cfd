"""The names of timm's optimizers, read from its file without importing it, so that a mistake takes no torch."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Mapping
from pathlib import Path

from echelon.core.errors import UserError, nearest

SHOWN = ("sgd", "nesterov", "momentum", "adam", "adamw", "lars", "lamb", "lion", "nadamw", "rmsprop")
OURS = ("sparse_adam",)  # of models with sparse tables
OF_TORCH = ("sgd", "nesterov", "momentum", "adam", "adamw")  # built without timm
# Those want a GPU library that is no dependency, or a closure or a second backward pass: they are refused.
NOT_SUPPORTED = ("fused", "bnb", "adahessian")


def declared_optimizers() -> Mapping[str, str]:
    """Return what timm says of each optimizer that it declares, by name; those of aliases and variants are missing."""
    declared = {}
    for node in ast.walk(_factory()):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "OptimInfo":
            given = {k.arg: k.value.value for k in node.keywords if isinstance(k.value, ast.Constant)}
            if isinstance(given.get("name"), str):
                declared[str(given["name"])] = str(given.get("description", ""))
    return declared


def supported_optimizers() -> Mapping[str, str]:
    """Return what is said of each optimizer that can be chosen by name."""
    of_timm = {name: about for name, about in declared_optimizers().items() if not name.startswith(NOT_SUPPORTED)}
    return of_timm | {OURS[0]: "Adam that moves what belongs to a table's row when that row is used (--sparse-tables)"}


def is_of_timm(name: str) -> bool:
    """Whether an optimizer is built by timm.

    >>> is_of_timm("lamb"), is_of_timm("adamw"), is_of_timm("module:Class")
    (True, False, False)
    """
    return ":" not in name and name.lower() not in (*OF_TORCH, *OURS)


def check_optimizer_name(name: str) -> None:
    """Refuse an optimizer that is no `module:Class`, and of which timm's file has no word.

    Raises:
        UserError: with the nearest name.
    """
    if ":" in name or name.lower() in (*SHOWN, *OURS) or name.lower() in _strings(_factory()):
        return
    if known := [each for each in supported_optimizers() if each not in OURS]:
        raise unknown_optimizer(name, known)


def unknown_optimizer(name: str, known: list[str]) -> UserError:
    """Build the refusal of an unknown name."""
    return UserError(
        f"unknown --optimizer {name!r}: {nearest(name.lower(), [*known, *OURS])}known: {', '.join((*SHOWN, *OURS))} "
        f"and {len(known) - len(SHOWN)} more of timm's (timm.optim.list_optimizers()), or module:Class of your own"
    )


def _factory() -> ast.Module:
    """Return timm's file that declares its optimizers; empty where it is another now."""
    spec = importlib.util.find_spec("timm")
    folder = Path(next(iter(spec.submodule_search_locations or []), "")) if spec else Path()
    file = folder / "optim" / "_optim_factory.py"
    return ast.parse(file.read_text(encoding="utf-8") if file.exists() else "")


def _strings(tree: ast.Module) -> set[str]:
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
