"""The names that data has, read from the files of `data/sources` without importing any: a mistake needs no torch."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from echelon.core.errors import unknown

_FOLDER = Path(__file__).parents[1] / "data" / "sources"
_MARKER = "SOURCE"
_ROOM = "echelon.data.sources"
_ASKED_OF_ANY = f"{_ROOM}.table"  # most names are asked of every kind, and this one imports the most
_DECLARED = ("names", "form", "folders", "suffixes", "tasks", "shapes", "packages")
_BARE = re.compile(r"[\w-]+")  # no path, and no form such as `module:function`


@dataclass(frozen=True)
class DeclaredKind:
    """What a file says of its kind of data.

    Attributes:
        file: its stem.
        names: those that are its own.
        form: how a user writes its other names; empty: it has none.
        text: the file's docstring.
        folders: that a folder of this kind holds, it or its `train/`.
        suffixes: of a file of this kind.
        tasks: that it is for where none is named.
        shapes: channels, side in pixels and classes of images whose name tells them.
        packages: that it may import to read samples.
    """

    file: str
    names: tuple[str, ...]
    form: str
    text: str
    folders: tuple[str, ...] = ()
    suffixes: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    shapes: Mapping[str, tuple[int, int, int]] = field(default_factory=dict)
    packages: tuple[str, ...] = ()


@lru_cache(maxsize=1)
def declared_kinds() -> tuple[DeclaredKind, ...]:
    """Return the kinds of data, by the names of their files."""
    return tuple(_declared())


def _declared() -> Iterator[DeclaredKind]:
    for file in sorted(_FOLDER.glob("[!_]*.py")):
        tree = ast.parse(file.read_text(encoding="utf-8"))
        if not any(_MARKER in _targets(node) for node in tree.body):
            continue
        values = _class_variables(tree)
        yield DeclaredKind(
            file=file.stem,
            names=tuple(values.get("names", ())),
            form=str(values.get("form", "")),
            text=ast.get_docstring(tree) or "",
            folders=tuple(values.get("folders", ())),
            suffixes=tuple(values.get("suffixes", ())),
            tasks=tuple(values.get("tasks", ())),
            shapes=dict(values.get("shapes", {})),
            packages=tuple(values.get("packages", ())),
        )


def holds_folders_of_a_kind(path: Path) -> bool:
    """Whether a folder holds the folders by which some kind of data is known."""
    return any(_holds(path, kind.folders) for kind in declared_kinds())


def _holds(path: Path, folders: tuple[str, ...]) -> bool:
    """Whether a folder, or its `train/`, holds some folders; not where there are none to hold."""
    return bool(folders) and any(all((place / name).is_dir() for name in folders) for place in (path, path / "train"))


def kind_by_name(source: str) -> DeclaredKind | None:
    """Return the kind of data of a file, by its suffix, or of a folder, by the folders in it; None: not known so."""
    path = Path(source).expanduser()
    of_file = path.suffix.lower() if not path.is_dir() else None
    return next((kind for kind in declared_kinds() if of_file in kind.suffixes or _holds(path, kind.folders)), None)


def modules_of(source: str) -> tuple[str, ...]:
    """Return what processes import that open data of a name: where that does not tell the kind, all that any may need.

    >>> modules_of("digits")
    ('echelon.data.sources.digits',)
    """
    own = next((kind for kind in declared_kinds() if source in kind.names), None) or kind_by_name(source)
    kinds = declared_kinds() if own is None else (own,)
    asked = _ASKED_OF_ANY if own is None or source != own.file else f"{_ROOM}.{own.file}"
    return (asked, *dict.fromkeys(package for kind in kinds for package in kind.packages))


def check_data_name(name: str) -> None:
    """Refuse data whose name is one word that no kind has, and where there is no file or folder of that name.

    Raises:
        UserError: with the nearest name.
    """
    if not _BARE.fullmatch(name) or Path(name).exists():
        return
    kinds = list(declared_kinds())
    known = [each for kind in kinds for each in kind.names]
    if name not in known:
        raise unknown("data", name, known, [kind.form for kind in kinds if kind.form], may_be_object=True)


def _class_variables(tree: ast.Module) -> dict[str, Any]:
    """Return the values that classes declare, the first of a name; names that a table has are the table's keys."""
    found: dict[str, Any] = {}
    for node in (each for kind in tree.body if isinstance(kind, ast.ClassDef) for each in kind.body):
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name) or not node.value:
            continue
        name = node.target.id
        if name not in _DECLARED or name in found:
            continue
        table = re.fullmatch(r"tuple\((\w+)\)", ast.unparse(node.value))
        found[name] = _keys(tree, table[1]) if table else ast.literal_eval(node.value)
    return found


def _keys(tree: ast.Module, table: str) -> tuple[str, ...]:
    values = next(node.value for node in tree.body if table in _targets(node))  # type: ignore[attr-defined]
    return tuple(ast.literal_eval(key) for key in values.keys)


def _targets(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.Assign):
        return [ast.unparse(target) for target in node.targets]
    return [ast.unparse(node.target)] if isinstance(node, ast.AnnAssign) else []
