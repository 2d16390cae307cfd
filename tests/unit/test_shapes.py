"""Each public function that takes tensors or arrays says their shapes: it, its class, a base of that, or its module."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import echelon

PACKAGE = Path(echelon.__file__).parent
TENSOR = re.compile(r"\b(Tensor|NDArray|ndarray)\b")
SHAPE = re.compile(
    r"\([\w*.+/ -]*,[\w*.+/, -]*\)|\(\.\.\.\)"  # (B, C), (n,), (..., D)
    r"|\[[\w*.+/, ()-]+\]"  # [numel], [n, r]
    r"|\b\d-D\b|\bscalars?\b"
    r"|\b(any|whatever|each|same|one|its|their|\w+'s?) shapes?\b|\bshapes?:",
    re.IGNORECASE,
)
"""Axes in brackets, `1-D`, a scalar, any shape, or the shape of something that has a name."""


def functions(tree: ast.Module) -> Iterator[tuple[ast.FunctionDef, ast.ClassDef | None]]:
    """Yield the public functions and methods of a module; a constructor's arguments are its class's."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield node, None
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for item in node.body:
                if isinstance(item, ast.FunctionDef) and not item.name.startswith("_"):
                    yield item, node


def takes_tensors(function: ast.FunctionDef) -> bool:
    arguments = (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)
    return any(a.annotation is not None and TENSOR.search(ast.unparse(a.annotation)) for a in arguments)


def said(*nodes: ast.FunctionDef | ast.ClassDef | ast.Module | None) -> bool:
    return any(node is not None and SHAPE.search(ast.get_docstring(node) or "") for node in nodes)


def unsaid() -> list[str]:
    trees = {file: ast.parse(file.read_text()) for file in sorted(PACKAGE.rglob("*.py"))}
    classes: dict[str, list[ast.ClassDef]] = defaultdict(list)
    homes: dict[ast.ClassDef, ast.Module] = {}
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name].append(node)
                homes[node] = tree

    def bases(node: ast.ClassDef) -> Iterator[ast.ClassDef]:
        for base in node.bases:
            name = ast.unparse(base).partition("[")[0].rpartition(".")[2]
            for known in classes.get(name, ()):
                yield known
                yield from bases(known)

    missing = []
    for file, tree in trees.items():
        for function, owner in functions(tree):
            if not takes_tensors(function) or said(function, owner, tree):
                continue
            above = list(bases(owner)) if owner is not None else []
            same = [f for b in above for f in b.body if isinstance(f, ast.FunctionDef) and f.name == function.name]
            if any(said(f, b, homes[b]) for b in above for f in same if f in b.body):
                continue
            missing.append(f"{file.relative_to(PACKAGE)}:{function.lineno} {function.name}")
    return missing


def test_shapes_are_said() -> None:
    assert not unsaid()
