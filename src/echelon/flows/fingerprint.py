"""What a step's result depends on, as one hash: the same fingerprint does not run again."""

from __future__ import annotations

import ast
import errno
import hashlib
import itertools
import json
import os
import re
import shlex
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from echelon.flows.base import TOKEN, Flow, FlowStep, Leaves
from echelon.trainer.folder import CONFIG_FILE

_NO_FILE = (errno.ENOENT, errno.ENOTDIR, errno.ELOOP)
_BLOCK_BYTES = 1 << 20
_OWN = re.compile(r"([A-Za-z_][\w.]*):(?:[A-Za-z_]\w*|$)")  # module:function, or what follows `-m`
_RUN_PARTS = ("checkpoints", "data.json", "tokeniser.json", "columns.json", "model.keras")
_SCRIPTS = (".py", ".sh")

OutputHashes = Callable[[str], Mapping[str, str]]
"""Returns the hash of each output of a step that is done, by name."""


@dataclass(frozen=True)
class StepFingerprint:
    """A step's fingerprint.

    Attributes:
        parts: `settings`, `inputs`, `data`, `code`, `versions`: the hash of each, which tell why a step runs again.
    """

    parts: Mapping[str, str]

    @property
    def digest(self) -> str:
        """All of it, as 64 hexadecimal digits."""
        return _digest(self.parts)

    def changed(self, before: Mapping[str, str]) -> list[str]:
        """Return the parts that are others than before."""
        return [name for name, value in self.parts.items() if before.get(name) != value]


def fingerprint(flow: Flow, step: FlowStep, hashes_of: OutputHashes) -> StepFingerprint:
    """Return a step's fingerprint, once all that it reads is done.

    Data is what its words and settings name that exists, outside of the flow: known by names, sizes and times, or by
    its bytes (`hash_content`). Code is the source of modules and scripts that they name, with all that these import
    from the flow's folder.
    """
    literal = list(dict.fromkeys(_words(step)))
    described = {
        "kind": step.kind, "arguments": list(step.arguments), "settings": [list(each) for each in step.settings],
        "outputs": {name: output.path for name, output in step.outputs.items()},
    }  # fmt: skip
    inputs = {str(read): hashes_of(read.step)[read.output] for read in step.reads}
    code = dict(_code(flow.base, literal))
    data = {text: path for text in literal if (path := _existing(flow.base, text)) and str(path.resolve()) not in code}
    parts = {
        "settings": _digest(described),
        "inputs": _digest(inputs),
        "data": _digest({text: list(_listed(path, flow.hash_content)) for text, path in data.items()}),
        "code": _digest({os.path.relpath(path, flow.base.resolve()): each for path, each in code.items()}),
        "versions": _digest({name: version(name) for name in ("torch", "echelon")}),
    }
    return StepFingerprint(parts)


def hash_output(path: Path, kind: Leaves) -> str:
    """Return the hash of an output's bytes; of a run those of its checkpoints and of what it knows of its data.

    Raises:
        FileNotFoundError: it is not there, or is a run whose configuration is not.
    """
    if not path.exists():
        raise FileNotFoundError(path)
    if kind is Leaves.RUN and not (path / CONFIG_FILE).stat().st_size:
        raise FileNotFoundError(path / CONFIG_FILE)
    roots = [path / name for name in _RUN_PARTS] if kind is Leaves.RUN else [path]
    digest = hashlib.sha256()
    for root in roots:
        for file, _ in _files(root):
            digest.update(f"{os.path.relpath(file, path)}\0{file_hash(Path(file))}\n".encode())
    return digest.hexdigest()


def file_hash(file: Path) -> str:
    """Return the SHA-256 of a file's bytes."""
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while block := opened.read(_BLOCK_BYTES):
            digest.update(block)
    return digest.hexdigest()


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=True, default=dict)
    return hashlib.sha256(text.encode()).hexdigest()


def _files(root: Path) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the files at or below a path in the order of their names."""
    if root.is_file():
        yield str(root), root.stat()
        return
    seen = {os.path.realpath(root)}
    for folder, inner, names in os.walk(root, followlinks=True):
        inner[:] = [name for name in sorted(inner) if _is_new(f"{folder}{os.sep}{name}", seen)]
        for name in sorted(names):
            file = f"{folder}{os.sep}{name}"
            try:
                status = os.stat(file)  # noqa: PTH116  text, as `_listed` says
            except OSError as error:
                if error.errno not in _NO_FILE:
                    raise
                continue  # a link that leads to none, or it was removed meanwhile
            if stat.S_ISREG(status.st_mode):
                yield file, status


def _is_new(folder: str, seen: set[str]) -> bool:
    """Whether a folder was not met before, where links may lead in a circle; notes that it was."""
    if not os.path.islink(folder):  # noqa: PTH114  text, as `_listed` says
        return True
    real = os.path.realpath(folder)
    is_new = real not in seen and not any(each.startswith(f"{real}{os.sep}") for each in seen)
    seen.add(real)
    return is_new


def _words(step: FlowStep) -> Iterator[str]:
    """Yield what a step's arguments and settings may name, references to outputs aside.

    Of a command also the words of a text for a shell, and what follows a `=` and a `-m`.
    """
    texts = [*step.arguments, *(value for _, value in step.settings)]
    if step.kind == "command":
        texts += [word for text in step.arguments for word in _shell_words(text)]
        modules = [module for flag, module in itertools.pairwise(texts) if flag == "-m"]
        texts += [f"{module}{inner}:" for module in modules for inner in ("", ".__main__")]
        texts += [text.partition("=")[2] for text in texts if "=" in text]
    yield from (text for text in texts if not TOKEN.search(text))


def _shell_words(text: str) -> list[str]:
    """Return the words of a text for a shell; what no shell would take is one word."""
    lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    try:
        return list(lexer)
    except ValueError:
        return [text]


def _existing(base: Path, text: str) -> Path | None:
    """Return the file or folder that a word names, if it does; the flow's own folder and those above it are no data."""
    if not text or len(text) > 1000 or "\n" in text:
        return None
    try:
        path = base / Path(text).expanduser()
        return path if path.exists() and path.resolve() not in _with_parents(base) else None
    except (OSError, RuntimeError):  # too long for a name, or of a user who is not known: so it is none
        return None


def _with_parents(folder: Path) -> list[Path]:
    whole = folder.resolve()
    return [whole, *whole.parents]


def _listed(path: Path, content: bool) -> Iterator[list[str | int]]:
    """Yield what is known of each file of some data."""
    for file, status in _files(path):  # text, not paths: of a million files these take most of the time
        name = file.removeprefix(str(path)).lstrip(os.sep) or os.curdir
        yield [name, file_hash(Path(file))] if content else [name, status.st_size, status.st_mtime_ns]


def _code(base: Path, texts: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield the files of code that words name, with what they import from the flow's folder, and their hashes."""
    roots = []
    for text in texts:
        path = _existing(base, text)
        if path is not None and path.is_file() and path.suffix in _SCRIPTS:
            roots.append(path)
        roots += [file for match in _OWN.finditer(text) if (file := module_file(base, match[1])) is not None]
    seen = {str(file.resolve()) for root in roots for file in _imported(base, root)}
    for source in sorted(seen):
        yield source, file_hash(Path(source))


def module_file(base: Path, name: str) -> Path | None:
    """Return the file of a module that lies below the flow's folder; of a package what its import runs."""
    inner = base.joinpath(*name.split("."))
    return next((file for file in (inner / "__init__.py", inner.with_suffix(".py")) if file.is_file()), None)


def _imported(base: Path, root: Path, known: set[Path] | None = None) -> Iterator[Path]:
    """Yield a file, and the modules below the flow's folder or beside it that it imports, and these in turn.

    Nothing is run: what is imported under a name that only the running program knows is not seen.
    """
    seen = known if known is not None else set()
    if root.resolve() in seen:
        return
    seen.add(root.resolve())
    yield root
    if root.suffix != ".py":
        return
    try:
        tree = ast.parse(root.read_bytes())
    except (SyntaxError, ValueError):  # the step itself will say so
        return
    for folder, name in _imports(tree, root):
        for where in (folder,) if folder is not None else dict.fromkeys((base, root.parent)):
            for file in _module_files(where, name):
                yield from _imported(base, file, seen)


def _imports(tree: ast.Module, file: Path) -> Iterator[tuple[Path | None, str]]:
    """Yield each module that a file may import, and the folder that a relative name begins in."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((None, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            folder = file.parents[node.level - 1] if 0 < node.level <= len(file.parents) else None
            inner = f"{node.module}." if node.module else ""
            yield from ((folder, f"{inner}{alias.name}") for alias in node.names)  # a module, or a name of one


def _module_files(where: Path, name: str) -> Iterator[Path]:
    """Yield the files that the import of a module runs: those of its packages, then its own."""
    words = name.split(".")
    for count in range(1, len(words) + 1):
        if (file := module_file(where, ".".join(words[:count]))) is not None:
            yield file
