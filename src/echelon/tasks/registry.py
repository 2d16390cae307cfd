"""Tasks by name: the files of this folder that say `TASK = ...`, and `module:Class` of the user's own."""

from __future__ import annotations

import ast
import importlib
import inspect
from functools import cache
from pathlib import Path

from echelon.core.errors import UserError, unknown
from echelon.core.own import find_own
from echelon.tasks.base import DataFacts, Task, TaskSettings

AUTO = "auto"
DEFAULT = "image_classification"


@cache
def names() -> tuple[str, ...]:
    """Return the names of the tasks that exist; imports none of them."""
    return tuple(sorted(path.stem for path in Path(__file__).parent.glob("*.py") if _declares(path)))


def _declares(path: Path) -> bool:
    lines = ast.parse(path.read_text()).body
    targets = [each for line in lines if isinstance(line, ast.Assign) for each in line.targets]
    return any(isinstance(each, ast.Name) and each.id == "TASK" for each in targets)


def check_task(name: str) -> None:
    """Refuse a name that no task has, without importing anything.

    Raises:
        UserError: with the nearest one.
    """
    if name != AUTO and ":" not in name and _file_name(name) not in names():
        raise unknown("task", name, [*(each.replace("_", "-") for each in names()), AUTO, "module:Class"])


def build_task(name: str) -> Task:
    """Build a task by its name, not yet fitted to data.

    Raises:
        UserError: there is none of this name, or `module:Class` is no task.
    """
    check_task(name)
    if ":" not in name:
        module = importlib.import_module(f"echelon.tasks.{DEFAULT if name == AUTO else _file_name(name)}")
        built = module.TASK()
    else:
        own = find_own("--task", name)
        built = own() if inspect.isclass(own) or inspect.isfunction(own) else own
    if not isinstance(built, Task):
        raise UserError(f"--task {name} is a {type(built).__name__}: name a subclass of echelon.tasks.Task")
    return built


def task_of(task: Task | str, data: DataFacts, settings: TaskSettings, source_task: str = "") -> Task:
    """Return the task of a run, fitted to its data.

    Args:
        task: the caller's own, or a name; `auto`: what the source says it is for.
        source_task: what the source says.

    Raises:
        UserError: there is no such task, or it does not fit the data.
    """
    if isinstance(task, str):
        task = build_task(source_task or DEFAULT if task == AUTO else task)
    return task.fitted(data, settings)


def _file_name(name: str) -> str:
    return name.replace("-", "_")
