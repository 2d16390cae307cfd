"""Tasks by name: the files of this folder that say `TASK = ...`, and `module:Class` of the user's own."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING

from echelon.config import RunConfig
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


@dataclass(frozen=True)
class TaskChoice:
    """The task that a description names: built where the data is known.

    Attributes:
        name: of a file of this folder, `module:Class`, or `auto`: what the data is for.
        settings: what the description says of the loss.
    """

    name: str
    settings: TaskSettings

    @classmethod
    def of(cls, config: RunConfig) -> TaskChoice:
        """Return the choice of a description."""
        from echelon.tasks.base import TaskSettings

        return cls(config.task, TaskSettings(config.optimizer.label_smoothing, config.optimizer.class_weights))

    def check(self) -> None:
        """Import a user's own; `check_task` knows the others.

        Raises:
            UserError: `module:Class` is no task.
        """
        if ":" in self.name:
            build_task(self.name)

    def fitted(self, data: DataFacts, user_task: Task | None = None) -> Task:
        """Return the task, fitted to its data.

        Args:
            user_task: the caller's, in place of the described one.

        Raises:
            UserError: there is no such task, or it does not fit the data.
        """
        task = user_task or build_task(data.task if self.name == AUTO else self.name)
        return task.fitted(data, self.settings)


def _file_name(name: str) -> str:
    return name.replace("-", "_")
