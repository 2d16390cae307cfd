"""Spec strings: the short text of a strategy, the same in YAML, on the command line and in a plot's legend.

A spec is `name`, `name(value)`, `name(key=value, ...)` or several joined by `+`.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, TypeVar

from echelon.core.errors import UserError, nearest

Value = int | float | bool | str
T = TypeVar("T")

_CALL = re.compile(r"^\s*([A-Za-z_][\w-]*)\s*(?:\((.*)\))?\s*$", re.DOTALL)
_WORD = re.compile(r"^[A-Za-z_][\w.-]*$")


@dataclass(frozen=True)
class Spec:
    """One strategy by name: positional values first, then named ones, as written."""

    name: str
    args: tuple[Value, ...] = ()
    kwargs: tuple[tuple[str, Value], ...] = ()

    def __str__(self) -> str:
        inside = [_show(v) for v in self.args] + [f"{k}={_show(v)}" for k, v in self.kwargs]
        return f"{self.name}({', '.join(inside)})" if inside else self.name


def _show(value: Value) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def parse_value(text: str, whole: str) -> Value:
    """Read one value of a spec: true/false, an integer, a float or a bare word.

    Raises:
        UserError: the text is none of these.
    """
    word = text.strip()
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    for convert in (int, float):
        try:
            number = convert(word)
        except ValueError:
            continue
        if isinstance(number, float) and not math.isfinite(number):
            raise UserError(f"{word} in spec {whole!r}: expected a finite number")
        return number
    if _WORD.match(word):
        return word
    raise UserError(f"cannot read {text.strip()!r} in spec {whole!r}: expected a number, true, false or a word")


def split_top_level(text: str, separator: str) -> list[str]:
    """Split at a separator outside parentheses.

    Raises:
        UserError: the parentheses do not match.
    """
    parts, depth, start = [], 0, 0
    for i, char in enumerate(text):
        depth += (char == "(") - (char == ")")
        if depth < 0:
            break
        if char == separator and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    if depth != 0:
        raise UserError(f"parentheses in spec {text!r} do not match")
    return [*parts, text[start:]]


def parse_spec(text: str) -> Spec:
    """Read one strategy.

    >>> str(parse_spec("diloco(50, outer_lr=0.7)"))
    'diloco(50, outer_lr=0.7)'

    Raises:
        UserError: the text is not a spec.
    """
    match = _CALL.match(text)
    if not match:
        raise UserError(f"cannot read spec {text!r}: expected name or name(key=value, ...)")
    args: list[Value] = []
    kwargs: dict[str, Value] = {}
    inside = match[2]
    for part in split_top_level(inside, ",") if inside and inside.strip() else []:
        key, equals, value = part.partition("=")
        if equals:
            if not _WORD.match(key.strip()):
                raise UserError(f"cannot read {part.strip()!r} in spec {text!r}: write key=value")
            if key.strip() in kwargs:
                raise UserError(f"{key.strip()!r} stands twice in spec {text!r}")
            kwargs[key.strip()] = parse_value(value, text)
        elif kwargs:
            raise UserError(f"in spec {text!r} the unnamed value {part.strip()!r} must stand before the named ones")
        else:
            args.append(parse_value(part, text))
    return Spec(match[1].replace("-", "_"), tuple(args), tuple(kwargs.items()))


def parse_chain(text: str) -> tuple[Spec, ...]:
    """Read strategies joined by `+`, such as `topk(0.01)+huffman`."""
    return tuple(parse_spec(part) for part in split_top_level(text, "+"))


def bind(spec: Spec, settings: type[T]) -> T:
    """Build a settings dataclass from a spec's values; unnamed ones fill its positional fields in order.

    Example: `bind(parse_spec("topk(0.01)"), TopK)` is `TopK(density=0.01)`.

    Raises:
        UserError: an unknown, missing or wrongly typed setting; names the nearest known one.
    """
    assert is_dataclass(settings)
    known = {f.name: f for f in fields(settings) if f.init}
    in_order = [name for name, field in known.items() if not field.kw_only]
    if spec.args and not in_order and known:
        raise UserError(f"{spec}: name the setting: {spec.name} takes {_settings(known)}")
    if len(spec.args) > len(in_order):
        raise UserError(f"{spec} has {len(spec.args)} unnamed values, {spec.name} takes {_settings(known)}")
    values: dict[str, Any] = dict(zip(in_order, spec.args, strict=False))
    for key, value in spec.kwargs:
        if key not in known:
            raise UserError(f"{spec.name} has no setting {key!r}: {nearest(key, known)}it takes {_settings(known)}")
        if key in values:
            raise UserError(f"{spec}: {key} is given twice")
        values[key] = value
    for key, value in values.items():
        values[key] = _typed(spec, key, value, str(known[key].type))
    try:
        return settings(**values)
    except TypeError as error:
        raise UserError(f"{spec}: a setting is missing; {spec.name} takes {_settings(known)}") from error
    except ValueError as error:
        raise UserError(f"{spec}: {error}") from error


def _settings(known: dict[str, Any]) -> str:
    return ", ".join(known) if known else "no settings"


def _typed(spec: Spec, key: str, value: Value, annotation: str) -> Value:
    """Check a value against the field's annotation (as text: bool, int, float or str, perhaps `| None`)."""
    wanted = [part.strip() for part in annotation.replace("<class '", "").replace("'>", "").split("|")]
    if type(value).__name__ in wanted:
        return value
    if "float" in wanted and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    words = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a word"}
    expected = " or ".join(words.get(w, w) for w in wanted if w != "None")
    raise UserError(f"{spec}: {key} must be {expected}, not {_show(value)!r}")
