"""Spec strings: the short text of a strategy, the same in YAML, on the command line and in a plot's legend.

chain  = spec { "+" spec }                      topk(0.01)+huffman
spec   = name [ "(" [ value { "," value } { "," name "=" value } ] ")" ]
value  = scalar { "+" scalar }                  node0+node1: a list
scalar = true | false | integer | float | word | "quoted text" | quantity | range
quantity = number unit                          8h, 500ms, 1gbit, 64mb
range  = integer ":" integer                    1:4
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from decimal import Decimal
from typing import Any, Protocol, TypeVar

from echelon.core.bounds import typed
from echelon.core.errors import UserError, nearest
from echelon.core.units import UNITS

T = TypeVar("T")

_CALL = re.compile(r"^\s*([A-Za-z_][\w-]*)\s*(?:\((.*)\))?\s*$", re.DOTALL)
_WORD = re.compile(r"^[A-Za-z_][\w.-]*$")
_OWN = re.compile(r"^[A-Za-z_][\w.]*:[A-Za-z_][\w.]*$")  # module:name
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_NAMED = re.compile(r'^([^"=]*)=(.*)$', re.DOTALL)
_QUANTITY = re.compile(r"^(\d+(?:\.\d+)?)\s*([A-Za-z]+)$")
_RANGE = re.compile(r"^(\d+):(\d+)$")


@dataclass(frozen=True)
class Quantity:
    """A number with its unit, as written: `8h`, `1gbit`.

    Attributes:
        number: at least 0.
        unit: one of `echelon.core.units.UNITS`, in lower case.

    Raises:
        UserError: the unit is unknown.
    """

    number: float
    unit: str

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            near = nearest(self.unit.replace("bps", "bit"), UNITS)  # how rates are written elsewhere
            raise UserError(f"unknown unit {self.unit!r}: {near}known: {', '.join(UNITS)}")

    @property
    def kind(self) -> str:
        """What it measures: `duration`, `rate` or `size`."""
        return UNITS[self.unit][0]

    @property
    def value(self) -> float:
        """The same in seconds, bits per second or bytes."""
        return self.number * UNITS[self.unit][1]

    def __str__(self) -> str:
        return f"{_show_number(self.number)}{self.unit}"


@dataclass(frozen=True)
class Range:
    """Whole numbers from the least to the most, both included: `1:4`.

    Raises:
        UserError: the larger one comes first.
    """

    least: int
    most: int

    def __post_init__(self) -> None:
        if self.least > self.most:
            raise UserError(f"range {self}: the smaller number comes first")

    def __str__(self) -> str:
        return f"{self.least}:{self.most}"


Scalar = int | float | bool | str | Quantity | Range
Value = Scalar | tuple[Scalar, ...]


@dataclass(frozen=True)
class Spec:
    """One strategy by name: positional values first, then named ones, as written."""

    name: str
    args: tuple[Value, ...] = ()
    kwargs: tuple[tuple[str, Value], ...] = ()

    def __str__(self) -> str:
        inside = [show_value(v) for v in self.args] + [f"{k}={show_value(v)}" for k, v in self.kwargs]
        return f"{self.name}({', '.join(inside)})" if inside else self.name


def show_value(value: Value) -> str:
    """Write a value so that `parse_value` reads the same one back.

    >>> show_value(True), show_value("blocks.[0-3]"), show_value(("node0", "node1")), show_value(Quantity(8.0, "h"))
    ('true', '"blocks.[0-3]"', 'node0+node1', '8h')
    """
    if isinstance(value, tuple):
        return "+".join(show_value(item) for item in value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return str(value).replace("e+", "e")
    if isinstance(value, str) and not _is_bare(value):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    return str(value)


def _show_number(number: float) -> str:
    """Write a number without an exponent, and whole ones without a point."""
    return format(Decimal(repr(number)), "f").removesuffix(".0")


def _is_bare(word: str) -> bool:
    """Whether a text is read as a word without quotes."""
    return bool(_WORD.match(word)) and word.lower() not in ("true", "false", "inf", "infinity", "nan")


def parse_value(text: str, spec: str) -> Value:
    """Read one value of a spec; several joined by `+` are a tuple.

    Raises:
        UserError: the text is no value; names the spec that it stands in.
    """
    try:
        return _parse_scalar(text, spec)
    except UserError:
        items = split_top_level(text, "+")
        if len(items) == 1 or not all(item.strip() for item in items):
            raise
    return tuple(_parse_scalar(item, spec) for item in items)


def _parse_scalar(text: str, spec: str) -> Scalar:
    word = text.strip()
    if word.lower() in ("true", "false"):
        return word.lower() == "true"
    for convert in (int, float):
        try:
            number = convert(word)
        except ValueError:
            continue  # no number of this kind: the next kind, or a word
        if isinstance(number, float) and not math.isfinite(number):
            raise UserError(f"{word} in spec {spec!r}: expected a finite number")
        return number
    if _QUOTED.fullmatch(word):
        return re.sub(r"\\(.)", r"\1", word[1:-1], flags=re.DOTALL)
    try:
        if match := _QUANTITY.match(word):
            return Quantity(float(match[1]), match[2].lower())
        if match := _RANGE.match(word):
            return Range(int(match[1]), int(match[2]))
    except UserError as error:
        raise UserError(f"{word} in spec {spec!r}: {error}") from None
    if _WORD.match(word) or _OWN.match(word):
        return word
    raise UserError(
        f"cannot read {word!r} in spec {spec!r}: expected a number, true, false, a word, a quantity such as 8h, "
        'a range such as 1:4, or "text in quotes"'
    )


def split_top_level(text: str, separator: str) -> list[str]:
    """Split at a separator outside parentheses and quotes.

    Raises:
        UserError: parentheses or quotes do not match.
    """
    pieces, depth, start, i = [], 0, 0, 0
    while i < len(text):
        if text[i] == '"':
            quoted = _QUOTED.match(text, i)
            if not quoted:
                raise UserError(f"quotes in spec {text!r} do not match")
            i = quoted.end()
            continue
        depth += (text[i] == "(") - (text[i] == ")")
        if depth < 0:
            break
        if text[i] == separator and depth == 0:
            pieces.append(text[start:i])
            start = i + 1
        i += 1
    if depth != 0:
        raise UserError(f"parentheses in spec {text!r} do not match")
    return [*pieces, text[start:]]


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
    for item in split_top_level(inside, ",") if inside and inside.strip() else []:
        named = _NAMED.match(item)
        if named:
            key = named[1].strip()
            if not _WORD.match(key):
                raise UserError(f"cannot read {item.strip()!r} in spec {text!r}: write key=value")
            if key in kwargs:
                raise UserError(f"{key!r} stands twice in spec {text!r}")
            kwargs[key] = parse_value(named[2], text)
        elif kwargs:
            raise UserError(f"in spec {text!r} the unnamed value {item.strip()!r} must stand before the named ones")
        else:
            args.append(parse_value(item, text))
    return Spec(match[1].replace("-", "_"), tuple(args), tuple(kwargs.items()))


def name_of(text: str) -> str:
    """Return the name that a spec, or a chain of specs, begins with.

    >>> name_of("topk(0.01)+huffman")
    'topk'
    """
    return parse_chain(text)[0].name


def parse_chain(text: str) -> tuple[Spec, ...]:
    """Read strategies joined by `+`, such as `topk(0.01)+huffman`."""
    return tuple(parse_spec(item) for item in split_top_level(text, "+"))


class Parameter(Protocol):
    """What a strategy's setting is checked by: of a dataclass's field, or of what a file declares."""

    @property
    def name(self) -> str:
        """As it is written in a spec."""

    @property
    def type(self) -> Any:
        """The annotation, as text: bool, int, float, str, Quantity, Range, `tuple[str, ...]`; perhaps `| None`.

        Perhaps with what the values may be (`core.bounds`).
        """

    @property
    def kw_only(self) -> Any:
        """Whether it must be named."""


def arguments_of(spec: Spec, parameters: list[Any]) -> dict[str, Value]:
    """Return a spec's values by the name of the setting that they are for, typed as it is declared.

    Args:
        parameters: the settings that there are, in order.

    Raises:
        UserError: an unknown, doubled or wrongly typed setting; names the nearest known one.
    """
    known: dict[str, Parameter] = {p.name: p for p in parameters}
    in_order = [name for name, parameter in known.items() if not parameter.kw_only]
    if spec.args and not in_order and known:
        raise UserError(f"{spec}: name the setting: {spec.name} takes {_settings(known)}")
    if len(spec.args) > len(in_order):
        raise UserError(f"{spec} has {len(spec.args)} unnamed values, {spec.name} takes {_settings(known)}")
    values: dict[str, Value] = dict(zip(in_order, spec.args, strict=False))
    for key, value in spec.kwargs:
        if key not in known:
            raise UserError(f"{spec.name} has no setting {key!r}: {nearest(key, known)}it takes {_settings(known)}")
        if key in values:
            raise UserError(f"{spec}: {key} is given twice")
        values[key] = value
    return {key: _checked(spec, key, value, str(known[key].type)) for key, value in values.items()}


def check_given(spec: Spec, values: Mapping[str, Value], needed: Sequence[str], names: Sequence[str]) -> None:
    """Refuse a spec that leaves out what has no default.

    Raises:
        UserError: names what is missing, and all settings.
    """
    if missing := [name for name in needed if name not in values]:
        are = "is" if len(missing) == 1 else "are"
        raise UserError(f"{spec}: {' and '.join(missing)} {are} missing; {spec.name} takes {', '.join(names)}")


def bind(spec: Spec, settings: type[T]) -> T:
    """Build a settings dataclass from a spec's values; unnamed ones fill its positional fields in order.

    Example: `bind(parse_spec("topk(0.01)"), TopK)` is `TopK(density=0.01)`.

    Raises:
        UserError: an unknown, missing or wrongly typed setting; names the nearest known one.
    """
    assert is_dataclass(settings)
    known = [item for item in fields(settings) if item.init]
    values = arguments_of(spec, known)
    needed = [p.name for p in known if p.default is MISSING and p.default_factory is MISSING]
    check_given(spec, values, needed, [p.name for p in known])
    try:
        return settings(**values)
    except ValueError as error:
        raise UserError(f"{spec}: {error}") from error


def spec_of(name: str, settings: Any) -> Spec:
    """Return the canonical spec of a settings dataclass: each value that is not the default, by name.

    `bind` makes equal settings of it.
    """
    values = [(f, getattr(settings, f.name)) for f in fields(settings) if f.init]
    return Spec(name, (), tuple((f.name, value) for f, value in values if value is not None and value != f.default))


def _settings(known: dict[str, Parameter]) -> str:
    return ", ".join(known) if known else "no settings"


_EXPECTED = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a word",
    "Quantity": "a quantity such as 8h or 24GB",
    "Range": "a range such as 1:4",
}


def _checked(spec: Spec, key: str, value: Value, annotation: str) -> Value:
    """Return a value as its field's annotation, given as text, types it, checked against what that allows."""
    kind, limit = typed(annotation)
    value = _typed(spec, key, value, kind)
    if limit is not None and (problem := limit.problem(value)):
        raise UserError(f"{spec}: {key} {problem}")
    return value


def _typed(spec: Spec, key: str, value: Value, annotation: str) -> Value:
    """Check a value against the field's type, as text."""
    wanted = [item.strip() for item in annotation.replace("<class '", "").replace("'>", "").split("|")]
    wanted = [item.rpartition(".")[2] if "[" not in item else item for item in wanted]
    if type(value).__name__ in wanted:
        return value
    if isinstance(value, int) and not isinstance(value, bool):
        if "float" in wanted:
            return float(value)
        if "Range" in wanted:
            return Range(value, value)
    if "tuple[str, ...]" in wanted and all(isinstance(item, str) for item in _items(value)):
        return _items(value)
    expected = " or ".join(_EXPECTED.get(w, "words such as a+b" if w.startswith("tuple") else w)
                           for w in wanted if w != "None")  # fmt: skip
    raise UserError(f"{spec}: {key} must be {expected}, not {show_value(value)!r}")


def _items(value: Value) -> tuple[Scalar, ...]:
    return value if isinstance(value, tuple) else (value,)
