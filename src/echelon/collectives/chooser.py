"""Which path is fastest for which size, measured between the ranks of a group."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist

from echelon.collectives import registry
from echelon.collectives.base import Path
from echelon.collectives.route import Route
from echelon.collectives.schedule import PathStep

BACKEND = "backend"
CANDIDATES = ("ring", "halving_doubling", "direct")
SIZES = tuple(1 << power for power in range(12, 25))
"""Bytes of the vectors that are tried: from a layer's biases to a bucket of DDP's."""
TURNS = 7
MAX_SUMS = 8
"""Sums of a turn, of short vectors."""
TURN_S = 0.005
GAIN = 1.1
"""How much faster than the backend's own a path must be: less could be chance, and costs a thread of Python."""
FAVOURABLE = TURNS - 1
"""Turns of a size in which it must have been faster at all."""
BUDGET_S = 4.0


@dataclass(frozen=True)
class SizeChoice:
    """A path for vectors of up to so many bytes; infinity: for all longer ones."""

    up_to_bytes: float
    spec: str


@dataclass(frozen=True)
class PathBySize(Path):
    """Each vector travels along the path that was chosen for its size.

    Attributes:
        choices: by size, ascending; the last one has no limit.
    """

    name: ClassVar[str] = "auto"
    choices: tuple[SizeChoice, ...]

    def __post_init__(self) -> None:
        limits = [choice.up_to_bytes for choice in self.choices]
        if limits != sorted(limits) or not limits or limits[-1] != math.inf:
            raise ValueError("choices of paths must ascend by size, and the last one have no limit")
        object.__setattr__(self, "_paths", tuple(registry.build(choice.spec) for choice in self.choices))

    def for_bytes(self, n_bytes: int) -> Path:
        """Return the path of the first choice that is large enough."""
        at = next(i for i, choice in enumerate(self.choices) if n_bytes <= choice.up_to_bytes)
        path: Path = self._paths[at]  # type: ignore[attr-defined]
        return path

    def schedule(self, rank: int, size: int, numel: int) -> list[PathStep]:
        """Return no steps: the chosen path has its own."""
        raise TypeError("a choice by size has no schedule: the path that it chooses has")


def choose_paths(group: dist.ProcessGroup, budget_s: float = BUDGET_S) -> tuple[SizeChoice, ...]:
    """Sum vectors of several sizes along each path, in turns; return the choices, the same on every rank.

    Sizes whose turns would not fit the rest of the budget are left to the backend. All ranks of the group call it.

    Raises:
        PeerLostError: a rank did not answer before the group's timeout.
    """
    routes = {spec: Route(registry.build(spec), group) for spec in (BACKEND, *CANDIDATES)}
    began, chosen = time.perf_counter(), []
    for size in SIZES:
        vector = torch.zeros(size // 4)
        once_s = max(_seconds(routes, vector, 1).values())  # opens connections, too
        left_s = budget_s - (time.perf_counter() - began)
        once_s, spent_s = _slowest(group, [once_s, -left_s])
        sums = max(1, min(MAX_SUMS, round(TURN_S / once_s)))
        if once_s * sums * len(routes) * TURNS > -spent_s:
            break
        turns = [_seconds(_rotated(routes, turn), vector, sums) for turn in range(TURNS)]
        flat = _slowest(group, [of_turn[spec] for spec in routes for of_turn in turns])
        rows = [flat[start : start + TURNS] for start in range(0, len(flat), TURNS)]
        chosen.append((size, fastest(dict(zip(routes, rows, strict=True)))))
    return by_size(chosen)


def fastest(seconds: Mapping[str, Sequence[float]]) -> str:
    """Return the path with the best ratio to the backend's own, turn by turn; unless that is clear, the backend."""
    best, gain = BACKEND, GAIN
    for spec, of_turns in seconds.items():
        ratios = sorted(own / other for own, other in zip(seconds[BACKEND], of_turns, strict=True))
        if ratios[len(ratios) // 2] > gain and sum(ratio > 1 for ratio in ratios) >= FAVOURABLE:
            best, gain = spec, ratios[len(ratios) // 2]
    return best


def by_size(chosen: Sequence[tuple[int, str]]) -> tuple[SizeChoice, ...]:
    """Return choices for all sizes from those that were tried: between two sizes a path that was chosen for both.

    Where they differ the backend is taken, for a path may be faster at one size and slower at the next, and so it is
    beyond the last size that was tried, unless that is the last of `SIZES`.

    >>> by_size([(4096, "ring"), (8192, "ring"), (16384, "direct"), (32768, "backend")])
    (SizeChoice(up_to_bytes=8192, spec='ring'), SizeChoice(up_to_bytes=inf, spec='backend'))
    """
    specs = [spec for _, spec in chosen] + ([] if len(chosen) == len(SIZES) else [BACKEND])
    between = [here if here == there else BACKEND for here, there in itertools.pairwise(specs)]
    limits = [*SIZES[: len(specs)], math.inf]
    choices = [SizeChoice(limit, spec) for limit, spec in zip(limits, [specs[0], *between, specs[-1]], strict=True)]
    return tuple(
        choice for i, choice in enumerate(choices) if i + 1 == len(choices) or choices[i + 1].spec != choice.spec
    )


def _rotated(routes: Mapping[str, Route], turn: int) -> dict[str, Route]:
    """Begin each turn with another path: none is always the one after a pause."""
    specs = [*routes]
    first = turn % len(specs)
    return {spec: routes[spec] for spec in specs[first:] + specs[:first]}


def _seconds(routes: Mapping[str, Route], vector: torch.Tensor, sums: int) -> dict[str, float]:
    seconds = {}
    for spec, route in routes.items():
        began = time.perf_counter()
        for _ in range(sums):
            route.sum_(vector)
        seconds[spec] = (time.perf_counter() - began) / sums
    return seconds


def _slowest(group: dist.ProcessGroup, values: Sequence[float]) -> list[float]:
    """Return each value's largest over the ranks: all of them then decide alike."""
    shared = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(shared, dist.ReduceOp.MAX, group=group)
    return [float(value) for value in shared]
