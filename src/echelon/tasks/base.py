"""The contract of a task: what a batch is, what its loss sums over, how a model is judged.

The engine knows no task by name. To add one, write one file with a subclass of `Task` and `TASK = ThatClass`.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.core.errors import UserError
from echelon.core.figure import ReportSection
from echelon.core.task import Metric, TaskFacts
from echelon.tasks import nest
from echelon.tasks.nest import Nest

SAMPLE = "sample"
"""The unit of a loss that is counted without being asked."""


@dataclass
class Batch:
    """One rank's part of a global batch.

    Args:
        inputs: what the model is called with: a tensor `(B, ...)`, a tuple of them (by position) or a dict (by name);
            B may be 0.
        targets: any nest of tensors `(B, ...)`.
        global_size: samples of the whole batch over all ranks, those that could not be decoded included.
        index: of the batch in its epoch.
        global_units: units of the loss in the whole batch, where the loader knows them; None: it does not.
    """

    inputs: Nest
    targets: Nest
    global_size: int
    index: int
    global_units: int | None = None


class DataFacts(Protocol):
    """What a task asks of the data."""

    @property
    def name(self) -> str:
        """Name of the data set, as its spec has it."""

    @property
    def task(self) -> str:
        """Name of the task that the data is for."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names by label; empty where targets are no classes."""

    @property
    def class_counts(self) -> tuple[int, ...]:
        """Training samples of each class."""

    @property
    def targets(self) -> Nest:
        """A nest of `TensorSpec`: what one sample's targets are."""


@dataclass(frozen=True)
class TaskSettings:
    """What the description of a run says of losses."""

    label_smoothing: float = 0.0
    class_weights: str = "none"


@dataclass(frozen=True)
class EvaluationResult:
    """What an evaluation gave, in plain values for JSON.

    Attributes:
        metrics: the primary one among them; None: undefined.
        detail: what the task's sections are made of, and what other programs may read in `evaluation.json`.
    """

    metrics: Mapping[str, float | None]
    detail: Mapping[str, Any] = field(default_factory=dict)


class Metrics(Protocol):
    """Collects what a rank's part of the evaluation set gave; then makes metrics of all ranks' parts."""

    def update(self, outputs: Any, targets: Nest) -> None:
        """Count a batch: the model's outputs and the targets, B samples each; B may be 0."""

    def compute(self, group: dist.ProcessGroup | None = None) -> EvaluationResult:
        """Return the metrics, the same on every rank of `group`; all call it, with or without samples."""


class Task(ABC):
    """What is learnt from what, and how it is judged. Subclasses are pickled to workers.

    Attributes:
        name: in specs, records and reports.
        unit: what the loss is a sum over: sample, token, pair.
        primary: the metric by which checkpoints and candidates are compared.
        curves: metrics that are drawn beside the primary one.
        headlines: further metrics that people look at first, the most telling one first.
        score_label: the share of samples that `training_score` counts, for people; empty: nothing is counted.
    """

    name: ClassVar[str]
    unit: ClassVar[str] = SAMPLE
    primary: Metric
    headlines: ClassVar[tuple[Metric, ...]] = ()
    curves: ClassVar[tuple[Metric, ...]] = ()
    score_label: ClassVar[str] = ""

    def facts(self) -> TaskFacts:
        """Return what a record says of the task."""
        kind = type(self)
        built_in = kind.__module__.startswith("echelon.tasks.")
        spec = kind.__module__.rpartition(".")[2] if built_in else f"{kind.__module__}:{kind.__qualname__}"
        return TaskFacts(self.name, spec, self.unit, self.primary, self.headlines, self.curves, self.score_label)

    def fitted(self, data: DataFacts, settings: TaskSettings) -> Self:
        """Return the task for some data.

        Raises:
            UserError: the data is of another task, or a setting does not fit; says what does.
        """
        if settings.label_smoothing or settings.class_weights not in ("none", ""):
            raise UserError(f"--label-smoothing and --class-weights are for classes; the task is {self.name}")
        return copy.copy(self)

    @property
    @abstractmethod
    def outputs(self) -> int:
        """Numbers that the model gives for a sample, the last dim of its output; 0: any."""

    @abstractmethod
    def loss_sum(self, outputs: Any, targets: Nest) -> Tensor:
        """Return the scalar sum of the losses over the units of B samples.

        The engine divides it by the units of the global batch, so that the gradient is the same however it is cut.

        Args:
            outputs: the model's; floating-point tensors `(B, ...)` are float32 or wider.
        """

    def units(self, targets: Nest) -> int:
        """Return the units of B samples; only those of a task whose unit is not the sample are asked."""
        return nest.rows(targets)

    def training_score(self, outputs: Any, targets: Nest) -> Tensor | None:
        """Return a cheap number that is summed over training samples, such as correct predictions; None: nothing."""
        return None

    @abstractmethod
    def metrics(self, device: torch.device) -> Metrics:
        """Return a new accumulator of metrics for outputs on a device."""

    def report_sections(self, result: EvaluationResult) -> Sequence[ReportSection]:
        """Return what reports show of an evaluation beside its metrics; one rank is asked, when it is the best."""
        return ()

    def wrong_outputs(self, outputs: Any, samples: int) -> str:
        """Say what is wrong with a model's outputs for some samples, as `must return ...`; empty: nothing is."""
        if not self.outputs:
            return ""
        first = next(iter(nest.leaves(outputs)), None)
        wanted = f"must return {self.outputs} numbers for each sample"
        if not isinstance(first, Tensor) or not first.ndim or len(first) != samples:
            return f"{wanted}; for a batch of {samples} it returned {_shape_of(outputs)}"
        if (first.ndim > 1 and first.shape[-1] != self.outputs) or (first.ndim == 1 and self.outputs != 1):
            return f"{wanted}; for a batch of {samples} it returned {_shape_of(outputs)}"
        return ""


def _shape_of(outputs: Any) -> Any:
    return list(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
