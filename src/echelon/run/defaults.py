"""Settings that a run's task suggests, where its user said nothing."""

from __future__ import annotations

import mimetypes
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.config import Resolved, RunConfig
from echelon.config.build import DEFAULT, SettingValue
from echelon.core.task import TaskDefaults
from echelon.tasks.registry import AUTO, TASKS, build_task

if TYPE_CHECKING:
    from echelon.tasks.base import Task


def with_task_defaults(resolved: Resolved, task: Task | None = None, opens_data: bool = True) -> Resolved:
    """Return a description with the defaults of its task, wherever the general defaults still stand.

    Data is read only where the task is `auto` and the data may be for several.

    Args:
        task: the caller's own, in place of the described one.
        opens_data: whether the description names the data; not where the caller has it.

    Raises:
        UserError: the task cannot be built, or data that decides on it cannot be read.
    """
    task = task or _task_of(resolved.config, opens_data)
    if task is None:
        return resolved
    config, origins = resolved.config, dict(resolved.origins)
    for name, value in _settings(task.defaults, origins["optimizer.name"] == DEFAULT):
        if origins[name] == DEFAULT:
            section, leaf = name.split(".")
            config = replace(config, **{section: replace(getattr(config, section), **{leaf: value})})
            origins[name] = f"task {task.name.replace('_', '-')}"
    return Resolved(config, origins)


def _settings(defaults: TaskDefaults, of_optimizer: bool) -> Iterator[tuple[str, SettingValue]]:
    """Yield dotted name and value of what a task suggests; of the optimizer only where the user chose no other."""
    suggested: list[tuple[str, SettingValue]] = [
        ("training.epochs", defaults.epochs),
        ("data.batch_size", defaults.batch_size),
        ("data.holdout", defaults.holdout),
    ]
    if of_optimizer:
        suggested += [
            ("optimizer.name", defaults.optimizer),
            ("optimizer.lr", defaults.lr),
            ("optimizer.weight_decay", defaults.weight_decay),
        ]
    yield from ((name, value) for name, value in suggested if value is not None)


def _task_of(config: RunConfig, opens_data: bool) -> Task | None:
    """Return the task of a description; None: it is known to suggest nothing, or only its data tells it."""
    name = config.task
    if name == AUTO:
        name = _task_of_files(config) if opens_data else ""
    if not name:
        return None
    file = name.replace("-", "_")
    if file in TASKS.names() and TASKS.declaration(file).constants["defaults"] == f"{TaskDefaults.__name__}()":
        return None  # that of the base: known without importing the task
    return build_task(name)


def _task_of_files(config: RunConfig) -> str:
    """Return the task that files are for; empty where the data is no files, or images: what reads them is heavy."""
    path = Path(config.data.source).expanduser()
    if not path.exists() or (path.is_dir() and (mimetypes.guess_type(_first_file(path))[0] or "").startswith("image/")):
        return ""
    from echelon.data.base import DataRequest
    from echelon.data.sources import kind_of

    return kind_of(config.data.source).task_of(DataRequest(config.data, config.training.seed))


def _first_file(path: Path) -> str:
    """Return the name of any file below a folder; empty: there is none."""
    return next((name for _, _, names in os.walk(path) for name in names if not name.startswith(".")), "")
