"""Typed contents to and from plain values, such as msgpack and JSON carry: what does not fit is refused.

A content is a frozen dataclass whose fields are `int` (0 or more, below 2**62), `float` (finite), `bool`, `str`,
`bytes`, another content, or lists, maps by name and optionals of these. A field that is one of several contents is
written as a map with that content's name. `dict[str, Any]` is any tree of plain values whose maps have names as keys:
for what its reader does not look into.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from collections.abc import Callable, Hashable, Mapping
from functools import cache, partial
from operator import attrgetter
from typing import Annotated, Any, TypeVar

_MAX_INT = 2**62
_DEEPEST = 16

T = TypeVar("T")

AnyFloat = Annotated[float, "nan and infinities too"]
"""The field of a content that may be no finite number, such as the loss of a run that diverges."""


class Malformed(ValueError):
    """A message that does not fit; `reason` is one word for the counters."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def to_plain(content: Any) -> Any:
    """Return a content as maps, lists and scalars."""
    cls: Callable[..., Any] = type(content)
    if dataclasses.is_dataclass(cls):
        fields = _fields(cls)
        values = fields.values(content)
        if not fields.flat:
            values = tuple(write(value) for write, value in zip(fields.writers, values, strict=True))
        return dict(zip(fields.order, values, strict=True))
    if isinstance(content, dict):
        return {name: to_plain(value) for name, value in content.items()}
    if isinstance(content, (list, tuple)):
        return [to_plain(value) for value in content]
    return content


def from_plain(cls: Callable[..., T], data: object) -> T:
    """Read a content; fields that have a default may be missing.

    Raises:
        Malformed: `fields`, `type` or `range`: what does not fit.
    """
    fields = _fields(cls)
    if type(data) is not dict:
        raise Malformed("fields")
    if data.keys() != fields.names:
        if not fields.required <= data.keys() <= fields.names:
            raise Malformed("fields")
        return cls(**{name: check(data[name]) for name, check in fields.checks if name in data})
    values = []
    for name, check in fields.checks:
        value = data[name]
        if check is not _int:
            value = check(value)
        elif type(value) is not int:  # as `_int` does, without a call: most fields are numbers
            raise Malformed("type")
        elif not 0 <= value < _MAX_INT:
            raise Malformed("range")
        values.append(value)
    return cls(*values)


@dataclasses.dataclass(frozen=True)
class _Fields:
    """A content's fields with what checks and what writes them, those without a default; `flat`: all are scalars."""

    checks: tuple[tuple[str, Callable[[Any], Any]], ...]
    order: tuple[str, ...]
    values: Callable[[Any], tuple[Any, ...]]
    writers: tuple[Callable[[Any], Any], ...]
    flat: bool
    names: frozenset[str]
    required: frozenset[str]


@cache
def _fields(cls: Hashable) -> _Fields:
    content: Any = cls
    hints = typing.get_type_hints(content, include_extras=True)
    fields = dataclasses.fields(content)
    missing = dataclasses.MISSING
    required = frozenset(f.name for f in fields if f.default is missing and f.default_factory is missing)
    checks = tuple((f.name, _check_of(hints[f.name])) for f in fields)
    flat = all(hints[f.name] in _FLAT for f in fields)
    order = tuple(f.name for f in fields)
    writers = tuple(_named if _variants(hints[name]) else to_plain for name in order)
    values = attrgetter(*order) if len(order) > 1 else lambda content: tuple(getattr(content, n) for n in order)
    return _Fields(checks, order, values, writers, flat, frozenset(order), required)


def _check_of(annotation: Any) -> Callable[[Any], Any]:
    """Return what checks a value against an annotation and returns it, read.

    Raises:
        TypeError: a content has a field of a type that has no plain form.
    """
    if annotation in _SCALARS:
        return _SCALARS[annotation]
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is list or (origin is tuple and arguments[1:] == (...,)):
        return _sequence(_check_of(arguments[0]), origin)
    if origin in (dict, Mapping) and arguments[0] is str:
        return _tree if arguments[1] is Any else _map(_check_of(arguments[1]))
    if origin in (types.UnionType, typing.Union) and len(arguments) == 2 and type(None) in arguments:
        inner = _check_of(next(a for a in arguments if a is not type(None)))
        return lambda value: None if value is None else inner(value)
    if variants := _variants(annotation):
        return _one_of(variants)
    if isinstance(annotation, type) and dataclasses.is_dataclass(annotation):
        return partial(from_plain, annotation)
    raise TypeError(f"{annotation} has no plain form")


def _int(value: Any) -> int:
    if type(value) is not int:
        raise Malformed("type")
    if not 0 <= value < _MAX_INT:
        raise Malformed("range")
    return value


def _float(value: Any) -> float:
    value = _any_float(value)
    if not math.isfinite(value):
        raise Malformed("range")
    return value


def _any_float(value: Any) -> float:
    if type(value) is not float and type(value) is not int:
        raise Malformed("type")
    try:
        return float(value)
    except OverflowError:
        raise Malformed("range") from None


def _exactly(wanted: type[Any]) -> Callable[[Any], Any]:
    def check(value: Any) -> Any:
        """Return the value, where its type is exactly the wanted one."""
        if type(value) is not wanted:
            raise Malformed("type")
        return value

    return check


def _sequence(check: Callable[[Any], Any], kind: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def checked(value: Any) -> Any:
        """Return the sequence with each element read."""
        if type(value) is not list:
            raise Malformed("type")
        return kind(map(check, value))

    return checked


def _map(check: Callable[[Any], Any]) -> Callable[[Any], dict[str, Any]]:
    def checked(value: Any) -> dict[str, Any]:
        """Return the map with each value read."""
        if type(value) is not dict or any(type(name) is not str for name in value):
            raise Malformed("type")
        return {name: check(inner) for name, inner in value.items()}

    return checked


def _variants(annotation: Any) -> dict[str, Callable[..., Any]]:
    """Return the contents of a union of contents, by their names; of anything else nothing."""
    if typing.get_origin(annotation) not in (types.UnionType, typing.Union):
        return {}
    kinds = typing.get_args(annotation)
    return {kind.__name__: kind for kind in kinds} if all(map(dataclasses.is_dataclass, kinds)) else {}


def _one_of(variants: dict[str, Callable[..., Any]]) -> Callable[[Any], Any]:
    def checked(value: Any) -> Any:
        """Return the content that the map's only name says."""
        if type(value) is not dict or len(value) != 1:
            raise Malformed("type")
        ((name, inner),) = value.items()
        if name not in variants:
            raise Malformed("type")
        return from_plain(variants[name], inner)

    return checked


def _named(content: Any) -> Any:
    return {type(content).__name__: to_plain(content)}


def _tree(value: Any) -> Any:
    if type(value) is not dict or not _has_names(value, _DEEPEST):
        raise Malformed("type")
    return value


def _has_names(value: Any, deepest: int) -> bool:
    """Whether all keys of nested maps are words, as records and journals can hold them."""
    if not isinstance(value, dict | list):
        return True
    if not deepest:
        return False
    if isinstance(value, list):
        return all(_has_names(inner, deepest - 1) for inner in value)
    return all(type(name) is str and _has_names(inner, deepest - 1) for name, inner in value.items())


_SCALARS: dict[Any, Callable[[Any], Any]] = {
    int: _int, float: _float, AnyFloat: _any_float, bool: _exactly(bool), str: _exactly(str), bytes: _exactly(bytes),
}  # fmt: skip
_FLAT = (*_SCALARS, list[int])
