"""A discrete-event simulation of tasks that wait for each other and share resources: devices, links, servers.

A resource works on one task at a time, in the order in which tasks become ready; several that share a pool, such as
the ranks of a machine with fewer processors, also wait for a place in it. Nothing is measured here: seconds are the
caller's, fitted to what was.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SimulatedTask:
    """Work that takes a resource for some time.

    Attributes:
        name: what it is, such as `forward`.
        resource: which does it; one that is named by a single task is its own.
        seconds: that it takes.
        after: places of the tasks, in the list of all, that must have ended before.
        pool: in which it needs a place as long as it is worked on; none where it is empty.
    """

    name: str
    resource: str
    seconds: float
    after: tuple[int, ...] = ()
    pool: str = ""


@dataclass(frozen=True)
class TaskSpan:
    """When a task was worked on, in seconds from the beginning of all; `ready_s`: since when it could have been."""

    task: SimulatedTask
    begin_s: float
    end_s: float
    ready_s: float


def simulate(tasks: Sequence[SimulatedTask], places: Mapping[str, int] | None = None) -> list[TaskSpan]:
    """Return when each task is worked on, in the order of the list.

    Of tasks that are ready at the same moment, a resource takes the one that comes first in the list. A pool gives its
    places to the tasks that have waited longest.

    Args:
        places: of each pool; one that is not named has enough.

    Raises:
        ValueError: tasks wait for each other in a circle, or for a place that is none.
    """
    waiting = [len(task.after) for task in tasks]
    followers: dict[int, list[int]] = defaultdict(list)
    for place, task in enumerate(tasks):
        for before in task.after:
            if not 0 <= before < len(tasks):
                raise ValueError(f"task {place} waits for task {before}, which is none of {len(tasks)}")
            followers[before].append(place)
    events = [(0.0, 0, place) for place, count in enumerate(waiting) if not count]  # 0: ready, 1: has ended
    heapq.heapify(events)
    free = _Free(tasks, places or {})
    spans: dict[int, TaskSpan] = {}
    while events:
        now = events[0][0]
        while events and events[0][0] == now:
            _, ended, place = heapq.heappop(events)
            if not ended:
                free.ask(now, place)
                continue
            free.give_back(place)
            for follower in followers[place]:
                waiting[follower] -= 1
                if not waiting[follower]:
                    heapq.heappush(events, (now, 0, follower))
        for place in free.begin():
            spans[place] = TaskSpan(tasks[place], now, now + tasks[place].seconds, free.asked_s(place))
            heapq.heappush(events, (spans[place].end_s, 1, place))
    if len(spans) < len(tasks):
        raise ValueError(f"{len(tasks) - len(spans)} tasks wait for each other in a circle")
    return [spans[place] for place in range(len(tasks))]


class _Free:
    """Which resources and places of pools are free, and which tasks wait for them."""

    def __init__(self, tasks: Sequence[SimulatedTask], places: Mapping[str, int]) -> None:
        self._tasks = tasks
        self._queues: dict[str, list[int]] = defaultdict(list)  # of resources, by place
        self._working: set[str] = set()
        self._touched: set[str] = set()
        self._left = {task.pool: places.get(task.pool, len(tasks)) for task in tasks if task.pool}
        self._pools: dict[str, list[tuple[float, int]]] = defaultdict(list)  # that have their resource, by waiting
        self._asked: dict[int, float] = {}

    def ask(self, now: float, place: int) -> None:
        """Take a task into its resource's queue."""
        resource = self._tasks[place].resource
        heapq.heappush(self._queues[resource], place)
        self._touched.add(resource)
        self._asked[place] = now

    def asked_s(self, place: int) -> float:
        """Return when a task became ready."""
        return self._asked[place]

    def give_back(self, place: int) -> None:
        """Free what a task had."""
        task = self._tasks[place]
        self._working.discard(task.resource)
        self._touched.add(task.resource)
        if task.pool:
            self._left[task.pool] += 1

    def begin(self) -> list[int]:
        """Return the tasks that have now what they need, and take it."""
        begun, pools = [], set(self._pools)
        for resource in sorted(self._touched - self._working):
            if not self._queues[resource]:
                continue
            place = heapq.heappop(self._queues[resource])
            self._working.add(resource)
            if pool := self._tasks[place].pool:
                heapq.heappush(self._pools[pool], (self._asked[place], place))
                pools.add(pool)
            else:
                begun.append(place)
        self._touched.clear()
        for pool in sorted(pools):
            while self._pools[pool] and self._left[pool]:
                self._left[pool] -= 1
                begun.append(heapq.heappop(self._pools[pool])[1])
        return begun


def makespan(spans: Sequence[TaskSpan]) -> float:
    """Return when the last task ends."""
    return max((span.end_s for span in spans), default=0.0)
