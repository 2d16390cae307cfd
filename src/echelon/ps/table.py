"""Which server holds which piece of the parameters: a pure function of the model, the same in every process.

Parameters stand behind each other in one flat vector, in the order in which the forward pass uses them. The vector is
cut into keys of at most `chunk_bytes`, and each key goes to the server that holds fewest bytes so far, so that keys of
neighbouring layers lie on different servers and all serve at the same time. A small model is cut finer: a server's one
key would be received, applied and sent in turn, where several overlap. Nothing of it depends on addresses or on
which processes live, so keys stay what they are when a server comes back.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from echelon.core.errors import UserError
from echelon.core.units import format_bytes
from echelon.parallel.row_values import RowDraw, first_values

OVERLAPPING_KEYS = 3  # of a server: one is received, one applied, one sent
FRAME_BYTES = 1 << 33  # at most, of a message's part: a key of 8 GiB
LEAST_BYTES = 64 * 1024  # below, a message costs more than what it carries
DTYPES = {"float32": torch.float32, "float64": torch.float64, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class RowStart:
    """How rows begin that nobody has changed yet: whoever is asked for one makes it.

    Attributes:
        draw: how the table is drawn.
        seed: of the run.
        name: of the table.
        first: row of the table that is row 0 here.
    """

    draw: RowDraw
    seed: int
    name: str
    first: int = 0

    def values(self, rows: Tensor, width: int, dtype: torch.dtype) -> Tensor:
        """Return the first values of rows, by their numbers here, `(R, width)`."""
        return first_values(rows + self.first, width, self.draw, self.seed, self.name, dtype)

    @property
    def fields(self) -> list[object]:
        """The same as a message has it."""
        draw = [self.draw.kind, self.draw.a, self.draw.b, sorted(self.draw.constants.items())]
        return [*draw, self.seed, self.name, self.first]

    @classmethod
    def of(cls, fields: Sequence[Any]) -> RowStart:
        """Read what a message has."""
        kind, a, b, constants, seed, name, first = fields
        draw = RowDraw(str(kind), float(a), float(b), {int(row): float(value) for row, value in constants})
        return cls(draw, int(seed), str(name), int(first))


@dataclass(frozen=True)
class ParameterInfo:
    """What the table must know of a parameter; `decay` is false where weight decay does not apply.

    `rate` is a factor of the learning rate. Of one `by_rows`, an embedding table, rows travel alone; `begins`: servers
    make them, when they are first asked for.
    """

    name: str
    shape: tuple[int, ...]
    decay: bool
    rate: float = 1.0
    by_rows: bool = False
    begins: RowStart | None = None


@dataclass(frozen=True)
class KeyPart:
    """A run of elements of a key that the optimizer treats as one tensor: offsets within the key."""

    start: int
    stop: int
    shape: tuple[int, ...]
    decay: bool
    name: str
    rate: float = 1.0

    @property
    def row(self) -> list[object]:
        """The part as a message has it; without a rate of its own it is written as before there were any."""
        fields: list[object] = [self.start, self.stop, self.shape, self.decay, self.name]
        return fields if self.rate == 1.0 else [*fields, self.rate]


@dataclass(frozen=True)
class KeyRange:
    """A range of the flat vector, held by one server; keys are numbered in forward order.

    `width`: elements of a row, where the key is rows of a table that travel alone; 0: it travels as a whole. `begins`:
    the server makes rows when they are first asked for; None: it is given all of them.
    """

    index: int
    start: int
    stop: int
    server: int
    parts: tuple[KeyPart, ...]
    width: int = 0
    begins: RowStart | None = None

    @property
    def fields(self) -> list[object]:
        """The key as a message has it; one that travels as a whole is written as before there were any tables."""
        whole: list[object] = [self.start, self.stop, self.server, [part.row for part in self.parts]]
        if self.begins is not None:
            return [*whole, self.width, self.begins.fields]
        return [*whole, self.width] if self.width else whole

    @property
    def rows(self) -> int:
        """Number of rows of a table; 0: the key is none of a table."""
        return self.numel // self.width if self.width else 0

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.stop - self.start


@dataclass(frozen=True)
class Cut:
    """How to cut: number of servers, bytes of a key, whether tensors stay whole, and the element type.

    Tensors stay whole where the optimizer or the codec looks at a tensor as such (LARS, LAMB, PowerSGD); otherwise a
    large one is split over the servers.
    """

    servers: int
    chunk_bytes: int
    whole_tensors: bool = False
    dtype: str = "float32"


@dataclass(frozen=True)
class KeyTable:
    """All keys of a model."""

    keys: tuple[KeyRange, ...]
    numel: int
    cut: Cut

    @property
    def torch_dtype(self) -> torch.dtype:
        """The element type."""
        return DTYPES[self.cut.dtype]

    def of_server(self, server: int) -> list[KeyRange]:
        """Return the keys that a server holds."""
        return [key for key in self.keys if key.server == server]

    def to_bytes(self) -> bytes:
        """Write the table for `from_bytes`: JSON."""
        keys = [key.fields for key in self.keys]
        cut = [self.cut.servers, self.cut.chunk_bytes, self.cut.whole_tensors, self.cut.dtype]
        return json.dumps({"numel": self.numel, "cut": cut, "keys": keys}).encode()

    @property
    def fingerprint(self) -> str:
        """A short name that differs for differing tables."""
        return hashlib.blake2b(self.to_bytes(), digest_size=8).hexdigest()


def table_from_bytes(raw: bytes) -> KeyTable:
    """Read a table.

    Raises:
        ValueError: it is none.
    """
    try:
        data: dict[str, Any] = json.loads(raw)
        keys = tuple(
            KeyRange(i, int(start), int(stop), int(server),
                tuple(KeyPart(int(a), int(b), tuple(int(d) for d in s), bool(d), str(n), *map(float, rate))
                      for a, b, s, d, n, *rate in parts),
                int(rows[0]) if rows else 0, RowStart.of(rows[1]) if rows[1:] else None)
            for i, (start, stop, server, parts, *rows) in enumerate(data["keys"])
        )  # fmt: skip
        servers, chunk, whole, dtype = data["cut"]
        table = KeyTable(keys, int(data["numel"]), Cut(int(servers), int(chunk), bool(whole), str(dtype)))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"not a table of keys: {error}") from None
    if table.cut.dtype not in DTYPES or any(not 0 <= k.server < table.cut.servers for k in keys):
        raise ValueError("not a table of keys: unknown element type or server")
    for key in keys:
        bounds = [0, *(p.stop for p in key.parts)]
        fits = all(p.start == a and math.prod(p.shape) == p.stop - a for a, p in zip(bounds, key.parts, strict=False))
        if not fits or bounds[-1] != key.numel or key.numel <= 0:
            raise ValueError(f"not a table of keys: key {key.index} is not its parts")
        if key.width and (key.width < 0 or [part.shape for part in key.parts] != [(key.rows, key.width)]):
            raise ValueError(f"not a table of keys: key {key.index} is not its rows")
    return table


def cut_table(parameters: Sequence[ParameterInfo], cut: Cut) -> KeyTable:
    """Cut a model's parameters into keys and give them to servers.

    >>> table = cut_table([ParameterInfo("w", (4, 4), True)], Cut(servers=2, chunk_bytes=32))
    >>> [(k.start, k.stop, k.server) for k in table.keys]
    [(0, 8, 0), (8, 16, 1)]
    """
    total = sum(math.prod(p.shape) for p in parameters)
    limit = _most_elements(sum(math.prod(p.shape) for p in parameters if not p.by_rows), cut)
    pieces = [piece for info in parameters for piece in _pieces(info, limit, cut)]
    groups = _group(pieces, limit)
    load = [0] * cut.servers
    keys: list[KeyRange] = []
    start = 0
    rows_before: dict[str, int] = {}
    for index, group in enumerate(groups):
        server = load.index(min(load))
        parts, offset = [], 0
        for numel, shape, info in group:
            parts.append(KeyPart(offset, offset + numel, shape, info.decay, info.name, info.rate))
            offset += numel
        of, width, begins = group[0][2], 0, None
        if of.by_rows:
            (rows, width), first = group[0][1], rows_before.get(of.name, 0)
            begins = None if of.begins is None else replace(of.begins, first=first)
            rows_before[of.name] = first + rows
        merged = tuple(_merged(parts, cut.whole_tensors))
        keys.append(KeyRange(index, start, start + offset, server, merged, width, begins))
        load[server] += offset
        start += offset
        _check_size(keys[-1], DTYPES[cut.dtype].itemsize)
    return KeyTable(tuple(keys), total, cut)


def _check_size(key: KeyRange, item_bytes: int) -> None:
    """Refuse what no message can carry; rows that servers make themselves travel a few at a time (UserError)."""
    size = key.numel * item_bytes
    if size > FRAME_BYTES and key.begins is None:
        raise UserError(
            f"--sync ps: {key.parts[0].name} is {format_bytes(size)} on one server, and a message carries up to "
            f"{format_bytes(FRAME_BYTES)}: give more servers, as ps(servers={key.server + 2}), or use --parallel fsdp=N"
        )


def _most_elements(total: int, cut: Cut) -> int:
    """Return how many elements a key may have: few enough that small models are spread, and their keys overlap."""
    item = DTYPES[cut.dtype].itemsize
    overlapping = max(LEAST_BYTES // item, math.ceil(total / (cut.servers * OVERLAPPING_KEYS)))
    return max(1, min(cut.chunk_bytes // item, math.ceil(total / cut.servers), overlapping))


_Piece = tuple[int, tuple[int, ...], ParameterInfo]


def _pieces(info: ParameterInfo, limit: int, cut: Cut) -> list[_Piece]:
    """Split what is larger than a key into equal pieces, and a table into one range of rows for each server."""
    numel = math.prod(info.shape)
    if info.by_rows:
        rows, width = info.shape
        bounds = [round(i * rows / cut.servers) for i in range(cut.servers + 1)]
        return [((b - a) * width, (b - a, width), info) for a, b in pairwise(bounds)]
    if cut.whole_tensors:
        return [(numel, info.shape, info)]
    count = max(1, math.ceil(numel / limit))
    bounds = [round(i * numel / count) for i in range(count + 1)]
    return [(b - a, _run_shape(b - a, info.decay), info) for a, b in pairwise(bounds)]


def _run_shape(numel: int, decay: bool) -> tuple[int, ...]:
    """What has no weight decay has one dim, as in the model: so the optimizer's usual rule tells them apart."""
    return (1, numel) if decay else (numel,)


def _group(pieces: list[_Piece], limit: int) -> list[list[_Piece]]:
    groups: list[list[_Piece]] = []
    size = 0
    for piece in pieces:
        if not piece[0]:
            continue
        apart = piece[2].by_rows or (bool(groups) and groups[-1][0][2].by_rows)
        if not groups or apart or size + piece[0] > limit:
            groups.append([])
            size = 0
        groups[-1].append(piece)
        size += piece[0]
    return groups


def _merged(neighbours: list[KeyPart], whole_tensors: bool) -> list[KeyPart]:
    """Join neighbours that the optimizer treats alike: one large tensor is updated faster than many small ones."""
    if whole_tensors:
        return neighbours
    merged: list[KeyPart] = []
    for part in neighbours:
        if merged and merged[-1].decay == part.decay and merged[-1].rate == part.rate:
            first = merged[-1]
            shape = _run_shape(part.stop - first.start, part.decay)
            part = KeyPart(first.start, part.stop, shape, part.decay, first.name, part.rate)
            merged.pop()
        merged.append(part)
    return merged
