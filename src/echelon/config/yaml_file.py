"""YAML that anyone may have written: read in bounded time and memory, or refused in one line.

What YAML can say beyond settings is not settings: aliases that stand for millions of values or for themselves, tags
that name Python's objects, keys that are no words, a key twice.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import yaml

from echelon.core.errors import UserError, shown

MAX_BYTES = 64 * 1024
MAX_VALUES = 10_000  # with aliases written out
MAX_DEPTH = 100
_STANDARD = "tag:yaml.org,2002:"
_TOO_DEEP = "lists within lists, deeper than any setting needs"


def read_yaml(file: Path) -> yaml.Node | None:
    """Return what a file holds as nodes, each with its line; None: nothing.

    Raises:
        UserError: the file cannot be read, is no YAML, is longer than any description, or holds what is no setting.
    """
    try:
        with file.open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except OSError as error:
        raise UserError(f"cannot read {file}: {error.strerror}") from None
    if len(data) > MAX_BYTES:
        raise UserError(
            f"{file} has more than {MAX_BYTES // 1024} kB, which no description needs: is it the one meant?"
        )
    try:
        text = data.decode("utf-8")
        if max(accumulate((c in "[{") - (c in "]}") for c in text), default=0) > MAX_DEPTH:
            raise RecursionError  # which composing would take its time to find out
        node = yaml.compose(text, Loader=yaml.SafeLoader)
        if node is not None:
            _Check(file).size(node)
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise UserError(f"{file}, line {line}: not YAML: bytes that are no UTF-8") from None
    except yaml.YAMLError as error:
        raise UserError(f"{file}{_problem(error, text)}") from None
    except RecursionError:
        raise UserError(f"{file}: {_TOO_DEEP}") from None
    return node


def _problem(error: yaml.YAMLError, text: str) -> str:
    """Return the line of an error, and what is wrong there."""
    if isinstance(error, yaml.reader.ReaderError):
        line = text.count("\n", 0, error.position) + 1
        return f", line {line}: not YAML: {error.reason}"
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return f" is not YAML: {shown(' '.join(str(error).split()), 300)}"
    mark, lines = error.problem_mark, text.splitlines()
    line = min(mark.line, max(0, len(lines) - 1))
    written = shown(lines[line].strip()) if lines else ""
    problem = " ".join(str(error.problem).split())
    if "\\t" in problem:
        problem = "a tab, where YAML takes spaces"
    elif "${" in written and "but got '{'" in problem:
        problem = "${...} stands in quotes within [...] and {...}"
    elif error.context_mark is not None and error.context_mark.line != mark.line:
        problem += f", for what begins in line {error.context_mark.line + 1}"
    return f", line {line + 1}: not YAML: {problem}{f': {written}' if written else ''}"


def plain(node: yaml.Node, where: str) -> Any:
    """Return a node's value as YAML understands it, without tags of any program.

    Raises:
        UserError: it has no value, such as a number of thousands of digits.
    """
    try:
        return yaml.SafeLoader("").construct_object(node, deep=True)
    except (yaml.YAMLError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise UserError(f"{where}: {shown(' '.join(str(error).split()))}") from None


class _Check:
    """Walks the nodes of a file once each, however often aliases name them."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self._sizes: dict[int, int] = {}
        self._open: set[int] = set()

    def size(self, node: yaml.Node) -> int:
        """Return how many values a node stands for.

        Raises:
            UserError: too many, or itself, or it is no setting.
        """
        if id(node) in self._open:
            raise self._refusal(node, "an alias stands for what it is in")
        if id(node) not in self._sizes:
            self._check_tag(node)
            self._open.add(id(node))
            size = 1 + sum(self.size(child) for child in self._children(node))
            self._open.discard(id(node))
            if size > MAX_VALUES:
                raise self._refusal(node, f"more than {MAX_VALUES} values, which no description needs")
            self._sizes[id(node)] = size
        return self._sizes[id(node)]

    def _children(self, node: yaml.Node) -> Iterator[yaml.Node]:
        if isinstance(node, yaml.SequenceNode):
            yield from node.value
        if not isinstance(node, yaml.MappingNode):
            return
        keys: set[str] = set()
        for key, value in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise self._refusal(key, "a key must be a word")
            if key.value in keys:
                raise self._refusal(key, f"{shown(key.value)} stands twice")
            keys.add(key.value)
            yield key
            yield value

    def _check_tag(self, node: yaml.Node) -> None:
        name = node.tag.removeprefix(_STANDARD)
        if name == node.tag or name.startswith("python/"):
            tag = f"!!{name}" if name != node.tag else node.tag
            raise self._refusal(node, f"{shown(tag)} is not used in descriptions: write a plain value")

    def _refusal(self, node: yaml.Node, reason: str) -> UserError:
        return UserError(f"{self._file}, line {node.start_mark.line + 1}: {reason}")
