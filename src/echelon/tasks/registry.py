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
    from echelon.tasks.own_loss import LossFunction

AUTO = "auto"
_OWN = "own"  # what a task of one's own may be taken to be called
_OF_ANY_TARGETS = "supervised"
TASKS = Registry("echelon.tasks", "task", "TASK")


def check_task(name: str) -> None:
    """Refuse a name that no task has, without importing any.

    Raises:
        UserError: with the nearest one.
    """
    if name == _OWN:
        raise UserError(
            "--task own: name your task itself, --task module:Class (a subclass of echelon.tasks.base.Task); a loss of "
            "your own alone is --loss module:function with --task supervised"
        )
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
class TaskObjects:
    """A task, a loss and metrics of the caller's own; None: as described."""

    task: Task | None = None
    loss: LossFunction | None = None
    metrics: object = None


@dataclass(frozen=True)
class TaskChoice:
    """The task that a description names: built where the data is known.

    Attributes:
        name: of a file of this folder, `module:Class`, or `auto`: what the data is for.
        settings: what the description says of the loss.
        loss, metrics, primary: of the user's own, as text; empty: the task's.
    """

    name: str
    settings: TaskSettings
    loss: str = ""
    metrics: str = ""
    primary: str = ""

    @classmethod
    def of(cls, config: RunConfig) -> TaskChoice:
        """Return the choice of a description."""
        from echelon.tasks.base import TaskSettings

        optimizer, training = config.optimizer, config.training
        settings = TaskSettings(optimizer.label_smoothing, optimizer.class_weights, training.worst_samples)
        return cls(config.task, settings, optimizer.loss, training.metrics, training.primary_metric)

    def check(self, objects: TaskObjects) -> None:
        """Import what is a user's own; `check_task` knows the others.

        Raises:
            UserError: `module:Class` is no task, or there is no such loss.
        """
        if ":" in self.name and objects.task is None:
            build_task(self.name)
        if self.loss and objects.loss is None:
            from echelon.tasks.own_loss import read_loss

            read_loss(self.loss)

    def fitted(self, data: DataFacts, objects: TaskObjects | None = None) -> Task:
        """Return the task, fitted to its data, with a loss and metrics of the user's own.

        Args:
            objects: the caller's, in place of what is described.

        Raises:
            UserError: there is no such task, loss or metric, or it does not fit the data.
        """
        objects = objects or TaskObjects()
        task = (objects.task or build_task(self.name_for(data, objects))).fitted(data, self.settings)
        has_loss = bool(self.loss) or objects.loss is not None
        if not (has_loss or task.needs_loss or self.metrics or objects.metrics is not None or self.primary):
            return task
        return self._tailored(task, objects, len(data.classes))

    def name_for(self, data: DataFacts, objects: TaskObjects) -> str:
        """Return the task's name; data without classes is for any task where the loss is the user's own."""
        if self.name != AUTO:
            return self.name
        has_loss, numbers_of_table = self.loss or objects.loss is not None, data.columns and data.task == "regression"
        return _OF_ANY_TARGETS if has_loss and not data.classes and not numbers_of_table else data.task

    def _tailored(self, task: Task, objects: TaskObjects, classes: int) -> Task:
        from echelon.tasks.own_loss import read_loss
        from echelon.tasks.own_metrics import choose_primary, named, read_metrics
        from echelon.tasks.tailored import TailoredTask

        loss = objects.loss if objects.loss is not None else read_loss(self.loss)
        if loss is None and task.needs_loss:
            raise UserError(f"--task {self.name} needs --loss: module:name of your own, or a class of torch.nn")
        if loss is not None and (self.settings.label_smoothing or self.settings.class_weights not in ("none", "")):
            raise UserError("--label-smoothing and --class-weights are for the task's own loss, not for --loss")
        known = task.metric_arguments(classes)
        metrics = named(objects.metrics) if objects.metrics is not None else read_metrics(self.metrics, known)
        return TailoredTask(task, loss, metrics, choose_primary(self.primary, task, metrics))


def _file_name(name: str) -> str:
    return name.replace("-", "_")
