"""Values as JSON has them."""

from __future__ import annotations

import math
from collections.abc import Mapping

JsonValue = str | int | float | bool | None | list["JsonValue"] | dict[str, "JsonValue"]
JsonObject = dict[str, JsonValue]


def finite(value: object) -> JsonValue:
    """Return nested values as JSON holds them: NaN and infinity, which it has not, become None, lone surrogates `?`.

    Raises:
        TypeError: a value is of no kind that JSON has.
    """
    if isinstance(value, float):  # the numbers of charts, thousands of them: first
        return value if math.isfinite(value) else None
    if isinstance(value, str):
        return encodable(value)
    if value is None or isinstance(value, int):
        return value
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    if isinstance(value, Mapping):
        return {encodable(str(k)): finite(v) for k, v in value.items()}
    raise TypeError(f"JSON has no {type(value).__name__}")


def finite_object(values: Mapping[str, object]) -> JsonObject:
    """Return values by name as `finite` does."""
    return {encodable(name): finite(value) for name, value in values.items()}


def encodable(text: str) -> str:
    """Return text without lone surrogates, by which Python writes names of files that are no UTF-8: `?` for each."""
    return text if text.isascii() else text.encode(errors="replace").decode()
