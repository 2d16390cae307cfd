"""A run's text is read once, by `run/resolve.py`: every other room gets typed objects."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import echelon

PACKAGE = Path(echelon.__file__).parent
READERS = {
    "echelon.compression": "read",
    "echelon.compression.registry": "read",
    "echelon.sync.registry": "read",
    "echelon.core.tuning": "read_tuning",
    "echelon.models.tuning.plan": "tuning_plan",
    "echelon.core.features": "read_features",
    "echelon.core.tokeniser": "read_tokeniser",
    "echelon.data.normalise": "read_normalise",
    "echelon.data.preparation": "read_preparation",
    "echelon.optim.own": "read_optimizer",
}
"""The functions that turn a spec's text into a typed object, by their module."""
ROOMS = ("core/", "config/", "run/resolve.py")
"""Where text is read."""
ENTRIES = {
    "api.py": "what a caller of `echelon.train` gives beside a description",
    "sync/own_loop.py": "`echelon.wrap`, in a loop that has no description",
    "collectives/ddp.py": "`echelon.ddp_hook`, likewise",
    "data/sources/__init__.py": "`open_data`, in a script that has none",
    "compression/__init__.py": "gives the room's reader to others",
    "compression/registry.py": "`build`, which benchmarks and tests call",
    "data/preparation.py": "puts together what resolve asks for",
    "models/tuning/plan.py": "likewise",
}
"""Modules that may name a reader all the same, and why."""


def used(tree: ast.Module, own: str) -> Iterator[str]:
    """Yield the readers that a module imports, reads off an imported module, or calls as its own."""
    modules: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if READERS.get(str(node.module)) == alias.name:
                    yield f"{node.module}.{alias.name}"
                if (module := f"{node.module}.{alias.name}") in READERS:
                    modules[alias.asname or alias.name] = module
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            module = modules.get(node.value.id, "")
            if READERS.get(module) == node.attr:
                yield f"{module}.{node.attr}"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and READERS.get(own) == node.func.id:
            yield f"{own}.{node.func.id}"


def module_of(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def uses() -> dict[str, list[str]]:
    found = {}
    for file in sorted(PACKAGE.rglob("*.py")):
        name = file.relative_to(PACKAGE).as_posix()
        if not name.startswith(ROOMS) and (readers := list(used(ast.parse(file.read_text()), module_of(file)))):
            found[name] = readers
    return found


def test_no_room_below_resolve_reads_a_spec() -> None:
    places = uses()
    assert not {name: readers for name, readers in places.items() if name not in ENTRIES}
    assert set(ENTRIES) == set(places), "an entry point that reads nothing is no longer one"


@pytest.mark.parametrize(
    "text",
    [
        "from echelon.sync.registry import read as read_sync",
        "from echelon.compression import registry as codecs\nplain = codecs.read('none')",
        "from echelon.models.tuning.plan import tuning_plan",
    ],
)
def test_a_reader_is_seen_however_it_is_imported(text: str) -> None:
    assert list(used(ast.parse(text), "echelon.mine"))


def test_every_reader_is_there() -> None:
    for module, name in READERS.items():
        path = PACKAGE.parent / module.replace(".", "/")
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        assert name in file.read_text(), f"{module}.{name}"
