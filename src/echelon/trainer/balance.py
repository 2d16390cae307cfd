"""`--balance auto`: replicas get parts of each batch by their measured speed, so that all are done together.

What is measured are seconds of own work, without waiting for others, as each window of steps tells them of every rank.
A decision is a pure function of these numbers, which all ranks have alike: nothing more travels. It is recorded, kept
in the checkpoint, and made again at the same step where steps are trained again.

Shares change slowly: after three looks of two seconds each that agree, and to half or twice at most. Equal shares stay
unless a step is to take 10% less; unequal ones unless it is 4%.

Where ranks come or go and the others go on, parts are dealt anew in the proportions in force, and measured anew.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heapreplace
from itertools import takewhile
from pathlib import Path
from statistics import fmean, median

from echelon.core.shares import share_sizes
from echelon.observe.phases import PHASES, Phase
from echelon.records.events import SharesDealt, StartedOver
from echelon.records.file import newest
from echelon.records.kinds import Steps
from echelon.trainer.resolved import ResolvedRun
from echelon.trainer.state import Cursor
from echelon.trainer.world import World, text_from_rank_0

BEGIN, REFINE = 1.10, 1.04  # how much longer a step takes with the present shares than with other ones
LOOKS, LOOK_S, LOOK_STEPS = 3, 2.0, 2
MOST_CHANGE = 2  # times: a share that grew by more could run out of memory before anybody has seen it
_BISECTIONS = 60

Sizes = tuple[int, ...]
"""Samples of each part of a full batch; of replicas, or of the ranks that divide samples."""


@dataclass(frozen=True)
class Deal:
    """A batch is divided otherwise from now on.

    Attributes:
        sizes: samples of each rank's part of a full batch, in the order of the ranks that divide samples.
        gain: how many times as long a step would take as before; 0: it was decided when these steps were trained
            first.
        slowest: the replica whose samples take longest, and how many times as long as the fastest one's.
        anew: ranks have come or gone.
    """

    sizes: Sizes
    gain: float = 0.0
    slowest: tuple[int, float] = (0, 1.0)
    anew: bool = False

    def event(self, step: int) -> SharesDealt:
        """Return what the record has of it, after a step."""
        parts = ", ".join(map(str, self.sizes))
        said = f"from step {step + 1} on, parts of a batch are {parts} samples"
        if self.anew:
            return SharesDealt(f"{said}, in the proportions that were known", step, self.sizes)
        if not self.gain:
            return SharesDealt(f"{said}, as when these steps were trained before", step, self.sizes)
        replica, times = self.slowest
        why = f"replica {replica} takes {times:.2g} times as long for a sample as the fastest"
        return SharesDealt(f"{said}: {why}; steps should take {1 / self.gain:.0%} of their time", step, self.sizes)


@dataclass(frozen=True)
class BatchParts:
    """What is divided.

    Attributes:
        samples: of a full batch.
        replicas: between which it is divided by speed.
        ranks_each: that divide the samples of each replica.
        least: samples of a rank's part.
    """

    samples: int
    replicas: int
    ranks_each: int = 1
    least: int = 1

    def of_ranks(self, by_replica: Sequence[int]) -> Sizes:
        """Return the parts of the ranks that divide samples; those of one replica are equal."""
        return tuple(size for part in by_replica for size in share_sizes(part, self.ranks_each))

    def of_replicas(self, by_rank: Sequence[int]) -> Sizes:
        """Return the parts of replicas."""
        each = self.ranks_each
        return tuple(sum(by_rank[first : first + each]) for first in range(0, len(by_rank), each))

    def fits(self, by_rank: Sequence[int]) -> bool:
        """Whether sizes are of this batch and of as many ranks, each with enough samples."""
        known = len(by_rank) == self.replicas * self.ranks_each and sum(by_rank) == self.samples
        return known and min(by_rank) >= self.least


class Balancer:
    """Decides on shares; all ranks have one, are told the same, and say the same.

    Attributes:
        sizes: of each rank's part of a full batch, in force.
    """

    def __init__(
        self, division: BatchParts, sizes: Sequence[int] = (), planned: Mapping[int, Sequence[int]] | None = None
    ):
        """Begin with shares (empty: equal ones), and with what is to be done after which step, as it was before."""
        self._division = division
        self.sizes = tuple(sizes) if sizes else division.of_ranks(share_sizes(division.samples, division.replicas))
        self._planned = dict(planned or {})
        self._forget()

    def _forget(self) -> None:
        self._looks: list[list[float]] = []
        self._is_first = True  # it has what comes with a change: batches made anew, kernels chosen
        self._begin_look()

    def _begin_look(self) -> None:
        self._own_s, self._seconds, self._steps = [0.0] * self._division.replicas, 0.0, 0

    def planned(self, step: int) -> Deal | None:
        """Return what was decided after a step when it was trained before; call it after every step."""
        if (sizes := self._planned.pop(step, None)) is None:
            return None
        self.sizes = tuple(sizes)
        self._forget()
        return Deal(self.sizes)

    def look(self, steps: Steps) -> Deal | None:
        """Look at a window of all ranks; returns what changes after it."""
        if self._planned:
            return None
        for replica, own_s in enumerate(_by_replica(steps, self._division.replicas)):
            self._own_s[replica] += own_s
        self._seconds, self._steps = self._seconds + steps.seconds, self._steps + steps.count
        if self._seconds < LOOK_S or self._steps < LOOK_STEPS:
            return None
        look = [own_s / self._steps for own_s in self._own_s]
        self._begin_look()
        if self._is_first:
            self._is_first = False
            return None
        self._looks = [*self._looks, look][-LOOKS:]
        return self._decide() if len(self._looks) == LOOKS else None

    def _decide(self) -> Deal | None:
        before = self._division.of_replicas(self.sizes)
        decided = decide(self._looks, before, self._division.least * self._division.ranks_each)
        if decided is None:
            return None
        costs = [median(own_s) / size for own_s, size in zip(zip(*self._looks, strict=True), before, strict=True)]
        gain = _longest(before, costs) / _longest(decided, costs)
        slowest = costs.index(max(costs)), max(costs) / min(costs)
        self.sizes = self._division.of_ranks(decided)
        self._forget()
        return Deal(self.sizes, gain, slowest)


def decide(looks: Sequence[Sequence[float]], sizes: Sizes, fewest: int = 1) -> Sizes | None:
    """Return other parts of the replicas; None: the present ones stay.

    Args:
        looks: of one look after the other, seconds of own work in a step, of each replica.
        sizes: samples of each replica's part in these steps.
        fewest: samples of a replica's part; where equal ones have no more, they stay.
    """
    samples, count = sum(sizes), len(sizes)
    if min(map(min, looks)) <= 0 or fewest * count > samples:
        return None
    costs = [[own_s / size for own_s, size in zip(look, sizes, strict=True)] for look in looks]
    typical = [median(column) for column in zip(*costs, strict=True)]
    equal = tuple(share_sizes(samples, count))
    best = best_sizes(samples, typical, [fewest] * count, [samples] * count)
    least, most = [max(fewest, -(-size // MOST_CHANGE)) for size in sizes], [size * MOST_CHANGE for size in sizes]
    chosen = best_sizes(samples, typical, least, most)
    reachable = all(low <= size <= high for low, size, high in zip(least, equal, most, strict=True))
    if reachable and _longest(equal, typical) <= REFINE * _longest(best, typical):
        chosen = equal
    enough = BEGIN if sizes == equal else REFINE
    return chosen if all(_longest(sizes, each) >= enough * _longest(chosen, each) for each in costs) else None


def dealt_anew(samples: int, before: Sequence[int], fewest: int = 1) -> Sizes:
    """Return the parts of ranks of which some are new: the others keep their proportions, a new one gets their mean.

    Args:
        before: samples of a full batch that each rank had; 0: it is new.
        fewest: samples of a part; where one would have less, all are equal.

    >>> dealt_anew(128, [80, 80, 20]), dealt_anew(128, [80, 20, 0]), dealt_anew(128, [43, 42])
    ((57, 57, 14), (68, 17, 43), (64, 64))
    """
    known = [size for size in before if size] or [1]
    weights = [size or max(1, round(fmean(known))) for size in before]
    sizes = share_sizes(samples, len(weights), weights)
    if max(weights) - min(weights) <= 1 or min(sizes) < fewest:
        sizes = share_sizes(samples, len(weights))
    return tuple(sizes)


def best_sizes(samples: int, costs: Sequence[float], least: Sequence[int], most: Sequence[int]) -> Sizes:
    """Divide samples so that the longest part is as short as can be.

    Args:
        costs: seconds a sample, of each part.
        least, most: samples of each part.

    >>> best_sizes(100, [1.0, 1.0, 2.0], [1] * 3, [100] * 3), best_sizes(100, [1.0, 9.0], [25, 25], [100] * 2)
    ((40, 40, 20), (75, 25))
    """
    bounds = list(zip(costs, least, most, strict=True))
    low, high = 0.0, samples * max(costs)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if sum(min(max(middle / cost, lo), hi) for cost, lo, hi in bounds) <= samples:
            low = middle
        else:
            high = middle
    sizes = [int(min(max(low / cost, lo), hi)) for cost, lo, hi in bounds]
    queue = [((sizes[i] + 1) * cost, i) for i, (cost, _, hi) in enumerate(bounds) if sizes[i] < hi]
    heapify(queue)
    for _ in range(samples - sum(sizes)):
        _, i = queue[0]
        sizes[i] += 1
        room = sizes[i] < most[i]
        heapreplace(queue, ((sizes[i] + 1) * costs[i] if room else float("inf"), i))
    return tuple(sizes)


def _longest(sizes: Sequence[int], costs: Sequence[float]) -> float:
    return max(size * cost for size, cost in zip(sizes, costs, strict=True))


def _by_replica(steps: Steps, replicas: int) -> list[float]:
    """Return the seconds of own work in a window, of each replica: of its rank that has most."""
    waits = PHASES.index(Phase.COMMUNICATE)
    own = [sum(row) - row[waits] for row in steps.phases]
    each = len(own) // replicas  # dp is the outermost axis: ranks of a replica follow each other
    return [max(own[first : first + each]) for first in range(0, len(own), each)]


def why_not(run: ResolvedRun, world: World, changes: bool) -> str:
    """Return why shares cannot follow speed in a run; empty where they can.

    Args:
        changes: ranks may come and go, each of them a replica.
    """
    if world.group is None and not changes:
        return "one worker has all of each batch"
    if world.placement is not None and world.placement.layout.dp == 1 and not changes:
        return "there is one replica, whose ranks do each step together"
    if run.config.model.sync_batchnorm:
        return "with --sync-batchnorm ranks wait for each other within layers, and which of them is slow is not seen"
    return ""


def make_balancer(division: BatchParts, world: World, cursor: Cursor, folder: Path) -> Balancer:
    """Return what decides on shares in a run that begins or goes on; all ranks call it together.

    The checkpoint's shares hold on where they are of as many ranks; what was decided in steps after it is done again.
    """
    if not division.fits(cursor.shares or (0,)):
        cursor.shares = ()
    planned = text_from_rank_0(json.dumps(_recorded_after(folder, cursor.step)) if world.leads else "", world)
    wanted = {int(step): sizes for step, sizes in json.loads(planned).items() if division.fits(sizes)}
    return Balancer(division, cursor.shares, wanted)


def _recorded_after(folder: Path, step: int) -> dict[str, list[int]]:
    """Return the shares that the record has of later steps, by the step after which they hold; the newest count."""
    found: dict[str, list[int]] = {}
    lines = takewhile(lambda line: not isinstance(line, StartedOver), newest(folder, SharesDealt, StartedOver))
    for line in lines:
        if isinstance(line, SharesDealt) and line.step > step:
            found.setdefault(str(line.step), list(line.sizes))
    return found
