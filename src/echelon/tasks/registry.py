"""Tasks by name: the files of this folder that say `TASK = ...`, and `module:Class` of the user's own."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING

from echelon.core.errors import UserError, naming, unknown
from echelon.core.own import find_own
from echelon.core.registry import Registry

if TYPE_CHECKING:
    from echelon.tasks.base import DataFacts, Task, TaskSettings

AUTO = "auto"
TASKS = Registry("echelon.tasks", "task", "TASK")


def check_task(name: str) -> None:
    """Refuse a name that no task has, without importing any.

    Raises:
        UserError: with the nearest one.
    """
    if name != AUTO and ":" not in name and _file_name(name) not in TASKS.names():
        with naming("--task"):
            raise unknown("task", name, [*(each.replace("_", "-") for each in TASKS.names()), AUTO, "module:Class"])


def build_task(name: str) -> Task:
    """Build a task by its name, not yet fitted to data.

    Raises:
        UserError: there is none of this name, or `module:Class` is no task.
    """
    from echelon.tasks.base import Task

    check_task(name)
    own = find_own("--task", name) if ":" in name else TASKS.settings_class(_file_name(name))
    built = own() if inspect.isclass(own) or inspect.isfunction(own) else own
    if not isinstance(built, Task):
        raise UserError(f"--task {name} is a {type(built).__name__}: name a subclass of echelon.tasks.base.Task")
    return built


def task_of(task: Task | str, data: DataFacts, settings: TaskSettings) -> Task:
    """Return the task of a run, fitted to its data.

    Args:
        task: the caller's own, or a name; `auto`: what the data is for.

    Raises:
        UserError: there is no such task, or it does not fit the data.
    """
    if isinstance(task, str):
        task = build_task(data.task if task == AUTO else task)
    return task.fitted(data, settings)


def _file_name(name: str) -> str:
    return name.replace("-", "_")
