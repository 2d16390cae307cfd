"""Metrics of torchmetrics beside a task's, on the same samples, added up over the same ranks."""

from __future__ import annotations

import copy
import inspect
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from echelon.core.errors import UserError, nearest
from echelon.core.own import OwnCall, call_with, read_calls
from echelon.core.spec import Spec, Value
from echelon.core.task import Metric as MetricFacts
from echelon.tasks.base import NO_TARGET, EvaluationResult, Metrics, StreamedMetrics, Task
from echelon.tasks.gathering import RowMessages, gather_states
from echelon.tasks.nest import Nest, beside, logits_in

if TYPE_CHECKING:
    from torchmetrics import Metric

FLAG = "--metrics"
PRIMARY_FLAG = "--primary-metric"
LOSS = MetricFacts("loss", "min")


def read_metrics(text: str, known: Mapping[str, Value]) -> dict[str, Metric]:
    """Build the metrics that a description names, by name: classes of torchmetrics or `module:Class`, with arguments.

    Args:
        known: arguments for those of torchmetrics that take such, where the description says nothing.

    Raises:
        UserError: there is no such metric, or it does not take these arguments.
    """
    from torchmetrics import Metric as TorchMetric

    built = [(call.spec.name, _built(call, known)) for call in read_calls(text)]
    return named([{_in_snake_case(name): value} if isinstance(value, TorchMetric) else value for name, value in built])


def _built(call: OwnCall, known: Mapping[str, Value]) -> Any:
    if call.is_own:
        return call.build(FLAG)
    kind, spec = _of_torchmetrics(call.name), call.spec
    parameters = {*inspect.signature(kind).parameters, *inspect.signature(kind.__new__).parameters}
    given = dict(spec.kwargs)
    filled = {name: v for name, v in known.items() if name in parameters and name not in given and not spec.args}
    try:
        return call_with(kind, Spec(spec.name, spec.args, (*filled.items(), *given.items())), FLAG)
    except (TypeError, ValueError) as error:
        raise UserError(f"{FLAG} {spec}: {' '.join(str(error).split())}") from error


def _of_torchmetrics(name: str) -> Any:
    import torchmetrics
    from torchmetrics import classification, regression

    known = {n: getattr(m, n) for m in (regression, classification, torchmetrics) for n in m.__all__ if n[0].isupper()}
    if name not in known:
        raise UserError(f"unknown {FLAG} {name!r}: {nearest(name, known)}name a class of torchmetrics, or module:Class")
    return known[name]


def named(metrics: Any) -> dict[str, Metric]:
    """Return metrics by name: those of a mapping or a collection have one, others that of their class.

    >>> import torchmetrics
    >>> list(named([torchmetrics.MeanSquaredError()]))
    ['mean_squared_error']

    Raises:
        UserError: one is no metric of torchmetrics, or two have one name.
    """
    from torchmetrics import Metric, MetricCollection

    pairs: list[tuple[str, Any]] = []
    for item in metrics if isinstance(metrics, list | tuple) else [metrics]:
        if isinstance(item, Mapping | MetricCollection):
            pairs += [(name, metric) for name, metric in item.items()]
        else:
            pairs.append((_in_snake_case(type(item).__name__), item))
    for name, metric in pairs:
        if isinstance(metric, str):
            raise UserError(
                f"metrics: {metric!r} is a name among objects: give names alone, metrics={metric!r}, or objects alone, "
                f"such as torchmetrics.{metric}(...)"
            )
        if not isinstance(metric, Metric):
            raise UserError(f"metric {name} is a {type(metric).__name__}: give metrics of torchmetrics")
    if len(dict(pairs)) < len(pairs):
        raise UserError(
            f"two metrics have one name ({', '.join(name for name, _ in pairs)}): give them names in a dict"
        )
    return dict(pairs)


def _in_snake_case(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


def facts_of(name: str, metric: Metric) -> MetricFacts | None:
    """Return a metric's direction as torchmetrics knows it; None: it does not."""
    higher = metric.higher_is_better
    return None if higher is None else MetricFacts(name, "max" if higher else "min")


def choose_primary(text: str, task: Task, metrics: Mapping[str, Metric]) -> MetricFacts:
    """Return the metric by which checkpoints are compared, with its direction: `f1_score`, `loss`, `mine(min)`.

    Raises:
        UserError: its direction is not known.
    """
    if not text:
        return task.primary
    [call] = read_calls(text)
    spec = call.spec
    sides = f"{PRIMARY_FLAG} {text}: write the side that is better: {spec.name}(min) or {spec.name}(max)"
    directions = [str(value) for value in (*spec.args, *(value for _, value in spec.kwargs))]
    if directions:
        if len(directions) > 1 or directions[0] not in ("min", "max"):
            raise UserError(sides)
        return MetricFacts(spec.name, directions[0])
    known = {metric.name: metric for metric in (LOSS, *task.headlines, *task.curves, task.primary)}
    known |= {name: facts for name, metric in metrics.items() if (facts := facts_of(name, metric)) is not None}
    if spec.name in known:
        return known[spec.name]
    if spec.name in metrics:
        raise UserError(sides)
    raise UserError(f"unknown {PRIMARY_FLAG} {text!r}: {nearest(text, known)}known: {', '.join(sorted(known))}")


class OwnMetrics:
    """A task's metrics, the user's own, and the loss where that is among those that are shown."""

    def __init__(self, task: Task, base: Metrics, metrics: Mapping[str, Metric], device: torch.device) -> None:
        """Take the task whose `primary` is to be there, its own metrics, and copies of the user's."""
        self._task, self._base, self._device = task, base, device
        self._own = {name: copy.deepcopy(metric).to(device) for name, metric in metrics.items()}
        for metric in self._own.values():
            metric.reset()
        self._shows_loss = LOSS.name in {task.primary.name, *(metric.name for metric in task.headlines)}
        self._loss = torch.zeros(2, dtype=torch.float64)

    def stream(self, messages: RowMessages, samples: int) -> None:
        """Let the rows of the task's own metrics travel, where they do."""
        if isinstance(self._base, StreamedMetrics):
            self._base.stream(messages, samples)

    def flush(self) -> None:
        """Begin the last messages."""
        if isinstance(self._base, StreamedMetrics):
            self._base.flush()

    def update(self, outputs: Any, targets: Nest) -> None:
        """Count a batch."""
        self._base.update(logits_in(outputs), targets)
        shown, wanted = self._task.for_metrics(outputs, targets)
        for metric in self._own.values():
            metric.update(beside(_scores_for(metric, shown, wanted), wanted), _targets_for(metric, wanted))
        if self._shows_loss:
            self._loss += torch.tensor([float(self._task.loss_sum(outputs, targets)), self._task.units(targets)])

    def compute(self, group: dist.ProcessGroup | None = None) -> EvaluationResult:
        """Return all metrics, the same on every rank of `group`; all call it.

        Raises:
            UserError: a metric is no number, or the primary one is not among them.
        """
        result = self._base.compute(group)
        metrics = dict(result.metrics)
        with torch.inference_mode():
            for name, metric in self._own.items():
                metric.process_group = group  # which is not the default one
                metric.dist_sync_fn = metric.dist_sync_fn or gather_states
                metric.distributed_available_fn = lambda: group is not None
                if group is not None and not metric.sync_on_compute:
                    metric.sync(metric.dist_sync_fn)
                metrics |= _numbers(name, metric.compute())
        primary = self._task.primary.name
        if self._shows_loss and (primary == LOSS.name or LOSS.name not in metrics):  # a task may count its own
            loss = self._loss.to(self._device)
            if group is not None:
                dist.all_reduce(loss, group=group)
            metrics[LOSS.name] = float(loss[0] / loss[1].clamp(min=1))
        if primary not in {*metrics, *(metric.name for metric in self._task.generates)}:
            raise UserError(f"unknown {PRIMARY_FLAG} {primary!r}: evaluations give {', '.join(metrics)}")
        return EvaluationResult(metrics, result.detail)


def _scores_for(metric: Metric, logits: Any, targets: Nest) -> Any:
    """Return what a metric takes: one that tells a class from the other, of two, the probability of the second."""
    kind = type(metric)
    is_binary = kind.__name__.startswith("Binary") and kind.__module__.startswith("torchmetrics.")
    if not (is_binary and isinstance(logits, Tensor) and isinstance(targets, Tensor)):
        return logits
    are_two_classes = logits.ndim == 2 and logits.shape[1] == 2 and targets.shape == logits.shape[:1]
    return logits.softmax(1)[:, 1] if are_two_classes else logits


def _targets_for(metric: Metric, targets: Nest) -> Nest:
    """Return what a metric takes: whole numbers where it is about classes, and what it ignores where nothing counts."""
    if not isinstance(targets, Tensor):
        return targets
    ignored = getattr(metric, "ignore_index", None)
    if isinstance(ignored, int) and ignored != NO_TARGET:
        targets = targets.masked_fill(targets == NO_TARGET, ignored)
    if not (targets.is_floating_point() and type(metric).__module__.startswith("torchmetrics.classification.")):
        return targets
    numbers = targets.long()
    return numbers if torch.equal(numbers.to(targets), targets) else targets


def _numbers(name: str, value: Any) -> dict[str, float | None]:
    if isinstance(value, Mapping):
        return {key: number for part, v in value.items() for key, number in _numbers(f"{name}_{part}", v).items()}
    if not isinstance(value, Tensor) or value.numel() != 1:
        shape = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise UserError(f"metric {name} gives {shape}: an evaluation's metric is one number (such as average=macro)")
    number = float(value)
    return {name: None if number != number else number}
