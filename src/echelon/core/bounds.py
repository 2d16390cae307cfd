"""What a setting of a strategy may be, declared beside its type: `density: Annotated[float, Bounds(above=0, most=1)]`.

It is read from the text of a file as well as of a class, so that an impossible value is refused before anything heavy
is imported.
"""

from __future__ import annotations

import ast
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from echelon.core.errors import nearest

_ANNOTATED = "Annotated["


@dataclass(frozen=True)
class Bounds:
    """The numbers that a setting may be; `None` (left out) is always allowed.

    Attributes:
        least: the smallest; None: there is none.
        most: the largest.
        above: it must be larger than this.
        below: it must be smaller than this.
        step: it must be a multiple of this.
        word: what it may be in place of a number, such as `auto`.
        hint: what is added to the refusal, such as `0.7 is the paper's`.
    """

    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None
    step: int | None = None
    hint: str = ""
    word: str = ""

    def problem(self, value: Any) -> str:
        """Return what a value must be instead; empty where it may be that."""
        if value is None or (self.word and value == self.word):
            return ""
        if isinstance(value, str):
            return f"must be {self}"
        too_low = (self.least is not None and value < self.least) or (self.above is not None and value <= self.above)
        too_high = (self.most is not None and value > self.most) or (self.below is not None and value >= self.below)
        if not (too_low or too_high or (self.step and value % self.step)):
            return ""
        end = self.least if too_low else self.most
        if not (too_low or too_high):
            end = round(value / (self.step or 1)) * (self.step or 1)
        near = f", the nearest is {end:g}" if end is not None else ""
        return f"must be {self}{near}{f' ({self.hint})' if self.hint else ''}"

    def __str__(self) -> str:
        said = (
            ("above", self.above), ("at least", self.least), ("below", self.below), ("at most", self.most),
            ("a multiple of", self.step),
        )  # fmt: skip
        numbers = " and ".join(f"{word} {limit:.10g}" for word, limit in said if limit is not None)
        return f"{numbers}, or {self.word}" if self.word else numbers


@dataclass(frozen=True)
class OneOf:
    """The words that a setting may be."""

    words: tuple[str, ...]

    def problem(self, value: Any) -> str:
        """Return what a value must be instead; empty where it may be that."""
        if value is None or value in self.words:
            return ""
        near = nearest(str(value), self.words).strip()
        return f"must be {self}, not {value}{f': {near}' if near else ''}"

    def __str__(self) -> str:
        return f"one of {', '.join(self.words)}"


Limit = Bounds | OneOf


def typed(annotation: str) -> tuple[str, Limit | None]:
    """Return the type of an annotation's text and what the values may be, where it says so.

    >>> typed("Annotated[int, Bounds(least=1)]")
    ('int', Bounds(least=1, most=None, above=None, below=None, step=None, hint=''))
    """
    return _parsed(annotation) if annotation.startswith(_ANNOTATED) else (annotation, None)


@lru_cache(maxsize=256)
def _parsed(annotation: str) -> tuple[str, Limit | None]:
    tree = ast.parse(annotation, mode="eval").body
    assert isinstance(tree, ast.Subscript) and isinstance(tree.slice, ast.Tuple), annotation
    kind, *notes = tree.slice.elts
    for note in notes:
        if isinstance(note, ast.Call) and isinstance(note.func, ast.Name):
            if note.func.id == Bounds.__name__:
                given = {keyword.arg: ast.literal_eval(keyword.value) for keyword in note.keywords}
                return ast.unparse(kind), Bounds(**given)  # type: ignore[arg-type]
            if note.func.id == OneOf.__name__:
                return ast.unparse(kind), OneOf(ast.literal_eval(note.args[0]))
    return ast.unparse(kind), None


def check_bounds(settings: Any) -> None:
    """Check the values of a dataclass that declares what they may be; its annotations are text.

    Raises:
        ValueError: names the setting, and what it must be.
    """
    for item in fields(settings):
        limit = typed(str(item.type))[1]
        if limit is not None and (problem := limit.problem(getattr(settings, item.name))):
            raise ValueError(f"{item.name} {problem}")
