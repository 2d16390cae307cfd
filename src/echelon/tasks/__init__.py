"""Tasks: what a batch is, what its loss sums over, how a model is judged, what a report shows. One file a task."""

from echelon.core.task import Metric, TaskFacts
from echelon.tasks.base import SAMPLE, Batch, DataFacts, Metrics, Task, TaskSettings
from echelon.tasks.registry import build_task, check_task, names, task_of

__all__ = [
    "SAMPLE",
    "Batch",
    "DataFacts",
    "Metric",
    "Metrics",
    "Task",
    "TaskFacts",
    "TaskSettings",
    "build_task",
    "check_task",
    "names",
    "task_of",
]
