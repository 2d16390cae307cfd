"""Values that rows of a table begin with: a hash of the seed, the table's name, the row and the column.

    u(r, j) = (splitmix64(key + r D + j) + 1/2) / 2^53        in (0, 1); its upper 53 bits
    value(r, j) = mean + std Phi^-1(u), low + (high - low) u, or a constant

as the model draws its table. So a row's values depend on no other row: whoever has it, or first asks for it, makes it,
and a table that is cut over ranks begins as a whole one does (splitmix64: Steele, Lea and Flood 2014).
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from echelon.parallel.deferred_init import Recording, last_draw

_BLOCK = 2**18  # elements at a time
_GAMMA, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@dataclass(frozen=True)
class RowDraw:
    """How the rows of a table are drawn, all alike.

    Attributes:
        kind: `normal` of mean `a` and deviation `b`, `uniform` from `a` to `b`, or `constant` `a`.
        constants: rows that have one value instead, such as that of padding.
    """

    kind: str
    a: float
    b: float
    constants: Mapping[int, float] = field(default_factory=dict)

    @classmethod
    def of(cls, recording: Recording, table: Tensor) -> RowDraw | None:
        """Return how a recorded model draws a table `(rows, D)`; None: not element by element alike.

        Args:
            table: the meta tensor.
        """
        draw = last_draw(recording, table)
        if draw is None:
            return None
        width = table.shape[1]
        constants: dict[int, float] = {}
        for offset, size, value in draw.constants:
            if size != (width,) or offset % width:
                return None
            constants[offset // width] = value
        kind = draw.name.removesuffix("_")
        given = {"normal": (0.0, 1.0), "uniform": (0.0, 1.0), "fill": (0.0, 0.0), "zero": (0.0, 0.0)}.get(kind)
        if given is None:
            return None
        a, b = (*draw.numbers, *given[len(draw.numbers) :])
        return cls(kind if kind in ("normal", "uniform") else "constant", a, b, constants)


@torch.no_grad()
def fill_rows(into: Tensor, first: int, draw: RowDraw, seed: int, name: str) -> None:
    """Give neighbouring rows of a table their first values.

    Args:
        into: the rows from `first` on, `(R, D)`, on any device.
        name: of the table.
    """
    step = _rows_at_a_time(into.shape[1])
    for start in range(0, len(into), step):
        part = into[start : start + step]
        rows = torch.arange(first + start, first + start + len(part))
        part.copy_(_values(rows, part.shape[1], draw, _key(seed, name)))


@torch.no_grad()
def first_values(rows: Tensor, width: int, draw: RowDraw, seed: int, name: str, dtype: torch.dtype) -> Tensor:
    """Return the first values of any rows of a table, `(R, width)`.

    Args:
        rows: their numbers `(R,)`, int64.
        name: of the table.
    """
    values = torch.empty((len(rows), width), dtype=dtype)
    step = _rows_at_a_time(width)
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        values[part] = _values(rows[part], width, draw, _key(seed, name)).to(dtype)
    return values


def _rows_at_a_time(width: int) -> int:
    return max(1, _BLOCK // max(1, width))


def _key(seed: int, name: str) -> int:
    return int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest(), "little")


def _values(rows: Tensor, width: int, draw: RowDraw, key: int) -> Tensor:
    """Return the values of some rows, `(R, width)` float64."""
    if draw.kind == "constant":
        values = torch.full((len(rows), width), draw.a, dtype=torch.float64)
    else:
        places = (rows[:, None] * width + torch.arange(width)).view(-1)
        uniform = ((_mixed(places, key) >> 11) & (2**53 - 1)).double().add_(0.5).mul_(2.0**-53)
        drawn = torch.special.ndtri(uniform) if draw.kind == "normal" else uniform
        scale = draw.b if draw.kind == "normal" else draw.b - draw.a
        values = drawn.mul_(scale).add_(draw.a).view(len(rows), width)
    for row, value in draw.constants.items():
        values[rows == row] = value
    return values


def _mixed(places: Tensor, key: int) -> Tensor:
    """Return splitmix64 of each place, as the int64 of the same bits; arithmetic wraps."""
    z = (places + 1) * _signed(_GAMMA) + _signed(key)
    z = (z ^ _shifted(z, 30)) * _signed(_FIRST)
    z = (z ^ _shifted(z, 27)) * _signed(_SECOND)
    return z ^ _shifted(z, 31)


def _shifted(z: Tensor, bits: int) -> Tensor:
    """Shift to the right without the sign."""
    return (z >> bits) & (2 ** (64 - bits) - 1)


def _signed(number: int) -> int:
    return number - 2**64 if number >= 2**63 else number
