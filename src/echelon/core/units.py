"""Bytes, seconds and bits per second, read from and written for people."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

from echelon.core.errors import UserError, naming

_SECONDS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_BYTES = {"b": 1.0, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12}
UNITS: dict[str, tuple[str, float]] = {
    unit: (kind, scale)
    for kind, scales in (("duration", _SECONDS), ("rate", _BITS), ("size", _BYTES))
    for unit, scale in scales.items()
}
"""What a unit measures, and how many seconds, bits per second or bytes it is."""
_NUMBER = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]+)\s*$")


def _parse(text: str, scale: dict[str, float], what: str, example: str) -> float:
    match = _NUMBER.match(text.lower())
    if not match or match[2] not in scale:
        raise UserError(
            f"{text!r} is not a {what}: write a number and one of {', '.join(scale)}, for example {example}"
        )
    return float(match[1]) * scale[match[2]]


def parse_seconds(text: str) -> float:
    """Read a duration such as `500ms`, `30s`, `5m` or `2h`, in seconds.

    >>> parse_seconds("5m")
    300.0
    """
    return _parse(text, _SECONDS, "duration", "5m")


def seconds_for(setting: str) -> Callable[[str], float]:
    """Return a reader of durations in seconds, whose refusals name a setting."""

    def read(text: str) -> float:
        """Read a duration such as `5m`."""
        with naming(setting):
            return parse_seconds(text)

    return read


def bytes_for(setting: str) -> Callable[[str], float]:
    """Return a reader of sizes in bytes, whose refusals name a setting."""

    def read(text: str) -> float:
        """Read a size such as `64mb`."""
        with naming(setting):
            return parse_bytes(text)

    return read


def parse_bytes(text: str) -> float:
    """Read a size such as `64mb`, in bytes.

    >>> parse_bytes("64mb")
    64000000.0
    """
    return _parse(text, _BYTES, "size", "64mb")


def parse_bits_per_s(text: str) -> float:
    """Read a link rate such as `100mbit`, in bits per second.

    >>> parse_bits_per_s("100mbit")
    100000000.0
    """
    return _parse(text, _BITS, "link rate", "100mbit")


def rounded(value: float, places: int) -> float:
    """Round for writing: what comes to nothing has no minus.

    >>> f"{rounded(-0.0014, 2):+.2f}"
    '+0.00'
    """
    return round(value, places) + 0.0


_SMALLEST_DECIMAL = 0.001  # below it fewer than two of four decimals would tell a value
_WHOLE, _MOST_DIGITS = 1e6, 1e15  # from these on decimals, or digits, would tell nothing
_FOURTH_DIGIT = 999.5  # from here on three digits round to a thousand


def sentence_case(text: str) -> str:
    """Write a name as it begins a sentence; one with capitals of its own stays as it is.

    >>> sentence_case("accuracy"), sentence_case("mIoU")
    ('Accuracy', 'mIoU')
    """
    return text if any(letter.isupper() for letter in text) else f"{text[:1].upper()}{text[1:]}"


def format_metric(value: float) -> str:
    """Write the value of a metric or a loss: four decimals, of one so small that they would say nothing three digits.

    One from a million on, such as an error of prices, has no decimals; one of more than 15 digits is rounded to four.

    >>> format_metric(0.91234), format_metric(0.0), format_metric(0.0000213)
    ('0.9123', '0.0000', '2.13e-05')
    >>> format_metric(27786203.9369), format_metric(-1.2345e18)
    ('27,786,204', '-1.234e+18')
    """
    size = abs(value)
    if 0 < size < _SMALLEST_DECIMAL:
        return f"{value:.3g}"
    if size >= _MOST_DIGITS:
        return f"{value:.4g}"
    return f"{value:,.0f}" if size >= _WHOLE else f"{value:.4f}"


def format_bytes(n_bytes: float) -> str:
    """Write a size with a decimal unit.

    >>> format_bytes(1_200_000)
    '1.2 MB'
    """
    size = float(n_bytes)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < _FOURTH_DIGIT:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def format_seconds(seconds: float) -> str:
    """Write a duration with the unit that suits it.

    >>> format_seconds(0.0032), format_seconds(75)
    ('3.2 ms', '1m 15s')
    """
    if seconds == math.inf:
        return "never"
    if seconds < _FOURTH_DIGIT / 1000:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m {rest}s"
    return f"{minutes // 60}h {minutes % 60}m"


def first_few(names: Sequence[str], most: int = 5) -> str:
    """Return the first of some names in words.

    >>> first_few(["a", "b"]), first_few("abcdef"), first_few([])
    ('a, b', 'a, b, c, d, e, ...', 'none')
    """
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "") or "none"


def many(number: int, what: str) -> str:
    """Return a number of things in words: `1,000 samples`.

    >>> many(1, "worker"), many(2, "worker")
    ('1 worker', '2 workers')
    """
    return f"{number:,} {what}{'s' * (number != 1)}"
