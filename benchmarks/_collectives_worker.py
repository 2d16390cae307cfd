"""One rank of `collectives`: sums vectors along each path, in turns, and returns the seconds of each sum."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from benchmarks._common import interleave
from echelon.collectives import Route, build, open_route
from echelon.collectives.base import Path
from echelon.collectives.chooser import PathBySize, choose_paths
from echelon.launch.link import Host
from echelon.trainer.path_choice import in_words

MAX_REPEATS = 50
CHOSEN = "auto"
"""Stands for what `--collective auto` chooses between these ranks."""


@dataclass(frozen=True)
class RankPlan:
    """What a rank is started with.

    Attributes:
        host: where the rank lives; None: this machine, over loopback.
        store: address and port of the rendezvous store.
        sizes: bytes of the float32 vectors.
        rounds: turns of each path and size.
        window_s: how long a turn should take at least (it sums once at least).
        timeout_s: how long a sum may take.
    """

    rank: int
    world: int
    host: Host | None
    store: tuple[str, int]
    paths: tuple[str, ...]
    sizes: tuple[int, ...]
    rounds: int
    window_s: float
    timeout_s: float


def measure(plan: RankPlan) -> dict[tuple[str, int], list[float]]:
    """Return {(path, bytes): [seconds per sum of each turn, the slowest rank's]}."""
    routes = {path: open_route(_path(path)) for path in plan.paths}
    seconds: dict[tuple[str, int], list[float]] = {(path, size): [] for size in plan.sizes for path in plan.paths}
    for size in plan.sizes:
        vector = torch.zeros(size // 4)
        repeats = {path: _repeats(route, vector, plan.window_s) for path, route in routes.items()}
        for _, path in interleave(plan.paths, plan.rounds):
            seconds[path, size].append(_turn(routes[path], vector, repeats[path]))
    return _of_slowest(seconds)


def _path(spec: str) -> Path:
    if spec != CHOSEN:
        return build(spec)
    group = dist.group.WORLD
    assert group is not None
    choices = choose_paths(group)
    if dist.get_rank() == 0:
        print("auto:", in_words(choices), flush=True)
    return PathBySize(choices)


def _of_slowest(seconds: dict[tuple[str, int], list[float]]) -> dict[tuple[str, int], list[float]]:
    """Return the slowest rank's seconds of each turn: where links differ, ranks end a sum at different times."""
    turns = torch.tensor(list(seconds.values()), dtype=torch.float64)
    dist.all_reduce(turns, dist.ReduceOp.MAX)
    return dict(zip(seconds, turns.tolist(), strict=True))


def _repeats(route: Route, vector: torch.Tensor, window_s: float) -> int:
    """How many sums fill a window, the same on every rank."""
    once = torch.tensor([_turn(route, vector, 1)])
    dist.all_reduce(once, dist.ReduceOp.MAX)
    return max(1, min(MAX_REPEATS, round(window_s / once.item())))


def _turn(route: Route, vector: torch.Tensor, repeats: int) -> float:
    dist.barrier()
    began = time.perf_counter()
    for _ in range(repeats):
        route.sum_(vector)
    return (time.perf_counter() - began) / repeats
