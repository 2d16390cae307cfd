"""Implementations by name: one file each, whose names and settings are known without importing them.

A file of the registry's package is an implementation when it assigns its settings dataclass to the registry's marker,
such as `CODEC = TopK`. What the dataclass declares is read from the text of the files (`ast`), so that a misspelt spec
is refused before anything heavy is imported.
"""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from echelon.core.bounds import typed
from echelon.core.errors import unknown
from echelon.core.spec import Spec, arguments_of, bind, check_given, parse_chain, parse_spec


@dataclass(frozen=True)
class Argument:
    """One setting of an implementation, as its file declares it.

    Attributes:
        type: the annotation, as text.
        default: as written; None: it must be given.
        kw_only: it must be named.
        help: what the docstring's `Attributes` say of it.
    """

    name: str
    type: str
    default: str | None
    kw_only: bool = False
    help: str = ""

    @property
    def value_type(self) -> str:
        """The annotation without what the values may be."""
        return typed(self.type)[0]

    @property
    def allowed(self) -> str:
        """What the values may be, such as `at least 1`; empty where nothing is declared."""
        limit = typed(self.type)[1]
        return "" if limit is None else str(limit)

    @property
    def is_constant(self) -> bool:
        """Whether it is a class variable, which no spec can set."""
        return self.type.startswith("ClassVar")


@dataclass(frozen=True)
class Declaration:
    """What a file says of its implementation.

    Attributes:
        summary: the first line of its docstring.
        arguments: the settings, in order.
        constants: class variables of the settings, their values as written.
        text: what its docstrings say beside the arguments, in paragraphs.
    """

    name: str
    summary: str
    arguments: tuple[Argument, ...]
    constants: Mapping[str, str] = field(default_factory=dict)
    text: str = ""


class Registry:
    """The implementations in one package, each a file that assigns a settings dataclass to `marker`."""

    def __init__(self, package: str, kind: str, marker: str, heavy: bool = False) -> None:
        """Describe where they are; nothing is read yet.

        Args:
            package: whose files they are; importing it must be cheap, unless it is `heavy`.
            kind: what a refusal calls them, such as `compression`.
            heavy: the package's files are found without importing it, for it lies in one that imports torch.
        """
        self._heavy = heavy
        self.package, self.kind, self.marker = package, kind, marker

    def names(self) -> list[str]:
        """Return the names of the implementations that exist."""
        return sorted(self._files())

    def declaration(self, name: str) -> Declaration:
        """Read what an implementation declares, without importing it.

        Raises:
            UserError: there is none of that name; names the nearest.
        """
        tree = _tree_of(self._file(name))
        target = next(_assigned(node) for node in tree.body if _assigns(node, self.marker))
        about = ast.get_docstring(tree) or ""
        classes = [node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == target]
        texts = [about, *(_beside_attributes(ast.get_docstring(node) or "") for node in classes)]
        declared = {a.name: a for a in _fields_of(tree, target)}
        arguments = tuple(a for a in declared.values() if not a.is_constant)
        constants = {a.name: a.default for a in declared.values() if a.is_constant and a.default is not None}
        return Declaration(name, about.partition("\n")[0], arguments, constants, "\n\n".join(filter(None, texts)))

    def constants(self, text: str) -> Mapping[str, str]:
        """Return what the implementation that a spec names declares of itself, without importing it.

        Raises:
            UserError: there is none of that name; names the nearest.
        """
        return self.declaration(parse_spec(text).name).constants

    def check(self, spec: Spec) -> None:
        """Refuse a spec whose name or settings do not exist, or are of the wrong type, without importing anything.

        Raises:
            UserError: names the nearest that exists.
        """
        arguments = list(self.declaration(spec.name).arguments)
        values = arguments_of(spec, arguments)
        check_given(spec, values, [a.name for a in arguments if a.default is None], [a.name for a in arguments])

    def chain(self, text: str) -> list[Spec]:
        """Read specs joined by `+`; none of them is checked.

        Raises:
            UserError: the text is not a spec.
        """
        return list(parse_chain(text))

    def canonical(self, text: str) -> str:
        """Write specs so that equal ones are written alike: `topk(0.01)` as `topk(density=0.01)`; imports nothing.

        Raises:
            UserError: the text is not a spec, or has settings that do not exist.
        """
        known = self.names()
        return "+".join(str(self._by_name(spec) if spec.name in known else spec) for spec in parse_chain(text))

    def _by_name(self, spec: Spec) -> Spec:
        arguments = self.declaration(spec.name).arguments
        values = arguments_of(spec, list(arguments))
        return Spec(spec.name, (), tuple((a.name, values[a.name]) for a in arguments if a.name in values))

    def module_of(self, text: str) -> str:
        """Return the name of the module of the implementation that a spec names, without importing it.

        Raises:
            UserError: there is none of that name; names the nearest.
        """
        return f"{self.package}.{self._file(parse_spec(text).name).stem}"

    def settings_class(self, name: str) -> type[Any]:
        """Import an implementation's settings dataclass.

        Raises:
            UserError: there is none of that name; names the nearest.
        """
        module = importlib.import_module(f"{self.package}.{self._file(name).stem}")
        settings: type[Any] = getattr(module, self.marker)
        return settings

    def build(self, text: str) -> Any:
        """Return the settings that a spec's text describes; imports the implementation.

        Raises:
            UserError: an unknown name or setting, or an impossible value.
        """
        return self.bind(parse_spec(text))

    def bind(self, spec: Spec) -> Any:
        """Return the settings that a spec describes; imports the implementation.

        Raises:
            UserError: an unknown name or setting, or an impossible value.
        """
        return bind(spec, self.settings_class(spec.name))

    def _file(self, name: str) -> Path:
        files = self._files()
        if name not in files:
            raise unknown(self.kind, name, sorted(files))
        return files[name]

    def _files(self) -> dict[str, Path]:
        of_package = _file_of(self.package) if self._heavy else None
        folders = [str(of_package.parent)] if of_package else list(importlib.import_module(self.package).__path__)
        files = {file.stem: file for folder in folders for file in Path(folder).glob("*.py")}
        return {name: file for name, file in files.items() if f"\n{self.marker} = " in _text_of(file)}


def _text_of(file: Path) -> str:
    return _read(file, file.stat().st_mtime_ns)


def _tree_of(file: Path) -> ast.Module:
    return _parsed(file, file.stat().st_mtime_ns)


@lru_cache(maxsize=1024)
def _read(file: Path, changed_ns: int) -> str:
    """Read a file once for as long as it is not changed: names are looked up again and again."""
    return file.read_text(encoding="utf-8")


@lru_cache(maxsize=256)
def _parsed(file: Path, changed_ns: int) -> ast.Module:
    return ast.parse(_read(file, changed_ns))


def _assigns(node: ast.stmt, name: str) -> bool:
    return isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets)


def _assigned(node: ast.stmt) -> str:
    assert isinstance(node, ast.Assign) and isinstance(node.value, ast.Name), "the marker names a class"
    return node.value.id


def _fields_of(tree: ast.Module, class_name: str) -> Iterator[Argument]:
    """Yield the fields of a dataclass, those of its bases first; classes of other files are looked up in these."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and node.name == class_name:
            for base in node.bases:
                if isinstance(base, ast.Name):
                    yield from _fields_of(tree, base.id)
            yield from _own_fields(node)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for alias in node.names:
                if (alias.asname or alias.name) == class_name and (file := _file_of(node.module)) is not None:
                    yield from _fields_of(_tree_of(file), alias.name)


def _file_of(module: str) -> Path | None:
    """Return the file of a module of this package, found without importing it; None for another's."""
    root = __name__.partition(".")[0]
    if module.partition(".")[0] != root:
        return None
    path = Path(str(importlib.import_module(root).__file__)).parent.joinpath(*module.split(".")[1:])
    return next((f for f in (path.with_suffix(".py"), path / "__init__.py") if f.exists()), None)


def _own_fields(node: ast.ClassDef) -> Iterator[Argument]:
    options = [ast.unparse(decorator) for decorator in node.decorator_list]
    is_dataclass = any(option.startswith("dataclass") for option in options)
    kw_only = any("kw_only=True" in option for option in options)
    described = _described(ast.get_docstring(node) or "")
    for item in node.body:
        if not isinstance(item, ast.AnnAssign) or not isinstance(item.target, ast.Name):
            continue
        name, default = item.target.id, None if item.value is None else ast.unparse(item.value)
        argument = Argument(name, ast.unparse(item.annotation), default, kw_only, described.get(name, ""))
        if is_dataclass or argument.is_constant:
            yield argument


def _beside_attributes(docstring: str) -> str:
    before, _, after = docstring.partition("Attributes:\n")
    lines = after.splitlines()
    end = next((i for i, line in enumerate(lines) if line and not line.startswith(" ")), len(lines))
    return f"{before.rstrip()}\n\n{chr(10).join(lines[end:])}".strip()


def _described(docstring: str) -> dict[str, str]:
    """Return what the `Attributes` section of a docstring says of each name, on one line."""
    described: dict[str, str] = {}
    name = ""
    for line in docstring.partition("Attributes:\n")[2].splitlines():
        if not line.startswith("    "):
            break
        if not line.startswith("     "):
            name, _, line = line.strip().partition(":")
        described[name] = f"{described.get(name, '')} {line.strip()}".strip()
    return described
