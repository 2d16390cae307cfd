"""Sets of numbers as first, last, first, last, ... of their runs: short on the wire where most numbers are in a row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from echelon.messages.plain import Malformed

_MOST = 10**7


def to_runs(numbers: Iterable[int]) -> list[int]:
    """Write a set as its runs.

    >>> to_runs({1, 2, 3, 7})
    [1, 3, 7, 7]
    """
    runs: list[int] = []
    for number in sorted(numbers):
        if runs and runs[-1] == number - 1:
            runs[-1] = number
        else:
            runs += [number, number]
    return runs


def from_runs(runs: Sequence[int]) -> set[int]:
    """Undo `to_runs`.

    Raises:
        Malformed: they are none, or hold more numbers than a run has steps.
    """
    pairs = list(zip(runs[::2], runs[1::2], strict=False))
    if len(runs) % 2 or any(last < first for first, last in pairs) or count_of(runs) > _MOST:
        raise Malformed("content")
    return {number for first, last in pairs for number in range(first, last + 1)}


def cut_runs(runs: Sequence[int], into: int) -> list[int]:
    """Return runs of numbers each of which is cut into so many.

    >>> cut_runs([1, 2, 5, 5], 2)
    [2, 5, 10, 11]
    """
    return [end * into + (into - 1 if i % 2 else 0) for i, end in enumerate(runs)]


def whole_steps(below: int, beyond: Sequence[int], batch_parts: int) -> int:
    """Return how many steps of so many tasks are done: all tasks before a number are, and those of runs beyond it.

    >>> whole_steps(5, [6, 9], 2)
    4
    """
    tasks = from_runs(beyond) | set(range(below - below % batch_parts, below))
    of_step = Counter(task // batch_parts for task in tasks)
    return below // batch_parts + sum(count == batch_parts for count in of_step.values())


def count_of(runs: Sequence[int]) -> int:
    """Return how many numbers runs hold."""
    return sum(last - first + 1 for first, last in zip(runs[::2], runs[1::2], strict=False))
