"""A discrete-event simulation of tasks that wait for each other and share resources: devices, links, servers.

A resource works on one task at a time, in the order in which tasks become ready. Nothing is measured here: seconds are
the caller's, fitted to what was.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class SimulatedTask:
    """Work that takes a resource for some time.

    Attributes:
        name: what it is, such as `forward`.
        resource: which does it; one that is named by a single task is its own.
        seconds: that it takes.
        after: places of the tasks, in the list of all, that must have ended before.
    """

    name: str
    resource: str
    seconds: float
    after: tuple[int, ...] = ()


@dataclass(frozen=True)
class TaskSpan:
    """When a task was worked on, in seconds from the beginning of all."""

    task: SimulatedTask
    begin_s: float
    end_s: float


def simulate(tasks: Sequence[SimulatedTask]) -> list[TaskSpan]:
    """Return when each task is worked on, in the order of the list.

    Of tasks that are ready at the same moment, a resource takes the one that comes first in the list.

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
    queues: dict[str, list[int]] = defaultdict(list)
    working: set[str] = set()
    spans: dict[int, TaskSpan] = {}
    while events:
        now = events[0][0]
        touched: set[str] = set()
        while events and events[0][0] == now:
            _, ended, place = heapq.heappop(events)
            touched.add(tasks[place].resource)
            if not ended:
                heapq.heappush(queues[tasks[place].resource], place)
                continue
            working.discard(tasks[place].resource)
            for follower in followers[place]:
                waiting[follower] -= 1
                if not waiting[follower]:
                    heapq.heappush(events, (now, 0, follower))
        for resource in sorted(touched - working):
            if queues[resource]:
                place = heapq.heappop(queues[resource])
                working.add(resource)
                spans[place] = TaskSpan(tasks[place], now, now + tasks[place].seconds)
                heapq.heappush(events, (spans[place].end_s, 1, place))
    if len(spans) < len(tasks):
        raise ValueError(f"{len(tasks) - len(spans)} tasks wait for each other in a circle")
    return [spans[place] for place in range(len(tasks))]


def makespan(spans: Sequence[TaskSpan]) -> float:
    """Return when the last task ends."""
    return max((span.end_s for span in spans), default=0.0)
