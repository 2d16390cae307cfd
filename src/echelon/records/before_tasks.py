"""What records and tables from before there were tasks leave out: all their runs were of image classification."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from echelon.core.task import BEFORE_TASKS, Metric
from echelon.records.kinds import Start

Value = TypeVar("Value")


def primary_of(start: Start | None) -> Metric:
    """Return the primary metric of a run; of one that records no task, accuracy, and its guess among the classes."""
    if start is None:
        return BEFORE_TASKS.primary
    metric = start.task.primary
    is_guessed = metric.chance is None and start.task == BEFORE_TASKS and bool(start.classes)
    return replace(metric, chance=1 / len(start.classes)) if is_guessed else metric


def with_chance(cells: Mapping[str, Value]) -> dict[str, Value | float]:
    """Return a row of a study's table with what guessing gives, where it has the number of classes instead."""
    row: dict[str, Value | float] = dict(cells)
    classes = row.pop("classes", None)
    if isinstance(classes, int | float) and classes:
        row["chance"] = 1 / classes
    return row
