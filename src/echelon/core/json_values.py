"""Values as JSON has them."""

from __future__ import annotations

import math
from collections.abc import Mapping

JsonValue = str | int | float | bool | None | list["JsonValue"] | dict[str, "JsonValue"]
JsonObject = dict[str, JsonValue]


def finite(value: object) -> JsonValue:
    """Return nested values as JSON holds them: NaN and infinity, which it has not, become None.

    Raises:
        TypeError: a value is of no kind that JSON has.
    """
    if isinstance(value, float):  # the numbers of charts, thousands of them: first
        return value if math.isfinite(value) else None
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, list | tuple):
        return [finite(v) for v in value]
    if isinstance(value, Mapping):
        return {str(k): finite(v) for k, v in value.items()}
    raise TypeError(f"JSON has no {type(value).__name__}")


def finite_object(values: Mapping[str, object]) -> JsonObject:
    """Return values by name as `finite` does."""
    return {name: finite(value) for name, value in values.items()}
