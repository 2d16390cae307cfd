"""From plain JSON values to dataclasses, by their annotations: compiled once for each class, cheap for each line."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, fields, is_dataclass
from functools import cache, partial
from itertools import chain
from types import UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin, get_type_hints

Decoder = Callable[[Any], Any]
T = TypeVar("T")

_FLOAT_OR_NONE = {float, type(None)}


def decode(kind: Callable[..., T], values: Mapping[str, Any]) -> T:
    """Build a dataclass from JSON values; unknown names are left out, absent ones and nulls have their default.

    Raises:
        KeyError: a field without a default is absent.
        TypeError: a value has another type than its field.
        ValueError: a number is not finite where its field must be (an annotation may say otherwise, see `nan_number`).
    """
    arguments = {}
    for name, decoder, has_default in _plan(kind):
        value = values.get(name)
        if value is not None:
            arguments[name] = decoder(value)
        elif not has_default:
            raise KeyError(name)
    return kind(**arguments)


@cache
def _plan(kind: Any) -> tuple[tuple[str, Decoder, bool], ...]:
    """List a dataclass's fields: name, what decodes its value, whether it may be absent."""
    hints = get_type_hints(kind, include_extras=True)
    return tuple(
        (f.name, _decoder(hints[f.name]), f.default is not MISSING or f.default_factory is not MISSING)
        for f in fields(kind)
        if f.init
    )


def _decoder(hint: Any) -> Decoder:
    """Return what turns a JSON value into a value of a type: numbers, text, sequences, mappings, dataclasses."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        decoder: Decoder = arguments[1]
        return decoder
    if origin in (Union, UnionType):
        (inner,) = (_decoder(argument) for argument in arguments if argument is not type(None))
        if inner is nan_number:
            return _nan_number_or_none
        return lambda value: None if value is None else inner(value)
    if origin is Sequence:
        inner = _decoder(arguments[0])
        if inner in (number, nan_number, _nan_number_or_none):
            return partial(_numbers, inner)
        if isinstance(inner, partial) and inner.func is _numbers:
            return partial(_table, inner)
        if inner is _text:
            return _texts
        return lambda value: tuple(map(inner, _checked(value, list)))
    if origin is Mapping:
        inner = _decoder(arguments[1])
        return lambda value: {name: inner(v) for name, v in _checked(value, dict).items()}
    if is_dataclass(hint):
        return partial(_nested, hint)
    return {float: number, int: _integer, str: _text, bool: _flag, Any: lambda value: value}[hint]


class ReadableRows(tuple[T, ...]):
    """The rows of a line that could be read; `left_out` could not."""

    left_out = 0


def readable_rows(read: Callable[[Any], T]) -> Callable[[Any], ReadableRows[T]]:
    """Return what reads a list of rows, each by `read`, and counts those that are not what they should be."""

    def decoder(rows: Any) -> ReadableRows[T]:
        """Read the rows.

        Raises:
            TypeError: it is no list.
        """
        readable = []
        for row in _checked(rows, list):
            with suppress(AttributeError, KeyError, TypeError, ValueError):
                readable.append(read(row))
        result = ReadableRows(readable)
        result.left_out = len(rows) - len(readable)
        return result

    return decoder


def left_out(rows: Sequence[Any]) -> int:
    """Return how many rows could not be read, of a sequence that was read; 0 for one that was made."""
    return rows.left_out if isinstance(rows, ReadableRows) else 0


def _nested(kind: Any, value: Any) -> Any:
    return decode(kind, _checked(value, dict))


def _numbers(inner: Decoder, value: Any) -> tuple[float, ...]:
    """Return a list of numbers as a tuple: most of a record is such lists, so they are not looked at one by one."""
    values = _checked(value, list)
    if _sum_is_finite(values):
        return tuple(values)
    if inner is _nan_number_or_none and set(map(type, values)) <= _FLOAT_OR_NONE:
        return tuple(values)
    return tuple(map(inner, values))


def _table(row: partial[tuple[float, ...]], value: Any) -> tuple[tuple[float, ...], ...]:
    """Return a list of rows of numbers as tuples, looked at all at once where they are what nearly all are."""
    rows = _checked(value, list)
    if all(type(r) is list for r in rows):
        if row.args[0] is _nan_number_or_none:
            are_known = set(map(type, chain.from_iterable(rows))) <= _FLOAT_OR_NONE
        else:
            are_known = _sum_is_finite(chain.from_iterable(rows))
        if are_known:
            return tuple(map(tuple, rows))
    return tuple(map(row, rows))


def _sum_is_finite(values: Iterable[Any]) -> bool:
    """Whether all values are finite numbers, as far as their sum tells: it says no of some that are, too large ones."""
    try:
        return math.isfinite(sum(values))
    except (TypeError, OverflowError):
        return False


def _texts(value: Any) -> tuple[str, ...]:
    values = _checked(value, list)
    return tuple(values) if set(map(type, values)) == {str} else tuple(map(_text, values))


def _nan_number_or_none(value: Any) -> float | None:
    return None if value is None else nan_number(value)


def number(value: Any) -> float:
    """Return a finite number.

    Raises:
        TypeError: it is no number.
        ValueError: it is not finite.
    """
    if type(value) is not float and type(value) is not int:
        raise TypeError(f"not a number: {value!r}")
    if not math.isfinite(value):
        raise ValueError("not a finite number")
    return float(value)


def nan_number(value: Any) -> float:
    """Return a number that may be NaN or infinite; null is NaN, for JSON proper has none.

    Raises:
        TypeError: it is no number.
    """
    if type(value) is float:
        return value
    return math.nan if value is None else number(value)


def _integer(value: Any) -> int:
    whole = number(value)
    if not whole.is_integer():
        raise ValueError("not a whole number")
    return value if type(value) is int else int(whole)


def _text(value: Any) -> str:
    return str(_checked(value, str))


def _flag(value: Any) -> bool:
    return bool(_checked(value, bool))


def _checked(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise TypeError(f"not a {kind.__name__}: {value!r}")
    return value
