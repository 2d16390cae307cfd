"""What others than the engine know of a task: its name and unit, and the metrics that count, with their direction."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """A number that an evaluation gives.

    Attributes:
        name: as in the record and in `summary.json`: `top1`, `rmse`.
        direction: `max` or `min`, the better side.
        label: for people, in tables; empty: the name.
        percent: whether it lies in 0..1 and is a share of samples.
        chance: what guessing gives; None: not known.
        noun: the word for it in sentences; empty: the label.
    """

    name: str
    direction: str
    label: str = ""
    percent: bool = False
    chance: float | None = None
    noun: str = ""

    @property
    def title(self) -> str:
        """What people call it."""
        return self.label or self.name

    def better(self, value: float, than: float | None) -> bool:
        """Whether a value is better than another; any is better than none."""
        if than is None:
            return True
        return value > than if self.direction == "max" else value < than

    def score(self, value: float) -> float:
        """Return a number that is higher where the value is better."""
        return value if self.direction == "max" else -value


@dataclass(frozen=True, slots=True)
class BestResult:
    """The best evaluation so far, by which later ones are judged.

    Attributes:
        value: of the primary metric.
        loss: which tells equal values apart, for of few samples many evaluations give the same share; None: not known.
    """

    value: float
    loss: float | None = None

    @classmethod
    def of(cls, value: float | None, loss: float | None) -> BestResult | None:
        """Return what messages and checkpoints carry as two numbers; without a value there was no evaluation.

        What is no number is not known.
        """
        if value is None or not math.isfinite(value):
            return None
        return cls(value, loss if loss is not None and math.isfinite(loss) else None)

    @staticmethod
    def numbers(best: BestResult | None) -> tuple[float | None, float | None]:
        """Return the two numbers, what `of` is given; both are None where there was no evaluation."""
        return (best.value, best.loss) if best is not None else (None, None)

    def improves(self, on: BestResult | None, metric: Metric) -> bool:
        """Whether an evaluation with this result is better than the best before: by the metric, if equal by the loss.

        >>> BestResult(0.9, 0.3).improves(BestResult(0.9, 0.4), Metric("top1", "max"))
        True
        """
        if on is None or self.value != on.value:
            return metric.better(self.value, on.value if on else None)
        return self.loss is not None and on.loss is not None and self.loss < on.loss


@dataclass(frozen=True)
class TaskDefaults:
    """Settings that a task suggests, where the general ones would train its models badly; None: the general one.

    Attributes:
        optimizer: its name; `lr`, `weight_decay` and `warmup_epochs` go with it, and only with it.
        holdout: share of samples that is held out where the data has no part for evaluation.
    """

    optimizer: str | None = None
    lr: float | None = None
    weight_decay: float | None = None
    epochs: int | None = None
    batch_size: int | None = None
    holdout: float | None = None
    warmup_epochs: float | None = None


@dataclass(frozen=True)
class Stagnation:
    """How long a metric has not improved.

    Attributes:
        reference: the best value by which later ones are measured; None: none so far.
        evaluations: in a row since then without an improvement.
    """

    reference: float | None = None
    evaluations: int = 0

    def after(self, value: float | None, metric: Metric, delta: float) -> Stagnation:
        """Return what an evaluation makes of it: a value better by more than `delta` is an improvement.

        >>> Stagnation(0.5, 2).after(0.6, Metric("top1", "max"), 0.2)
        Stagnation(reference=0.5, evaluations=3)
        """
        if value is not None and math.isfinite(value):
            gain = math.inf if self.reference is None else metric.score(value) - metric.score(self.reference)
            if gain > delta:
                return Stagnation(value, 0)
        return Stagnation(self.reference, self.evaluations + 1)


@dataclass(frozen=True)
class TaskFacts:
    """A task in a run's record.

    Attributes:
        name: `image_classification`, or what a task of the user's own calls itself.
        spec: by which the task is found again: its name, or `module:Class`.
        unit: what the loss is a sum over: sample, token, pair.
        primary: the metric by which checkpoints and candidates are compared.
        headlines: further metrics that people look at first.
        curves: metrics that are drawn beside the primary one.
        score_label: the share of samples that is counted in training; empty: nothing is.
        units_per_sample: where all samples have as many; 0: they differ, or it is not known.
        speed_unit: what speeds count `units_per_sample` of in each sample; empty: the unit.
        generated: names of metrics that are of at most `generation_samples` samples of an evaluation.
    """

    name: str
    spec: str
    unit: str
    primary: Metric
    headlines: Sequence[Metric] = ()
    curves: Sequence[Metric] = ()
    score_label: str = ""
    units_per_sample: int = 0
    generated: Sequence[str] = ()
    generation_samples: int = 0
    speed_unit: str = ""

    def title_of(self, metric: str) -> str:
        """Return what people call a metric.

        >>> facts = TaskFacts("t", "t", "sample", Metric("top1", "max", "top-1"))
        >>> facts.title_of("top1"), facts.title_of("macro_recall")
        ('top-1', 'macro recall')
        """
        known = {each.name: each.title for each in (self.primary, *self.headlines, *self.curves)}
        return known.get(metric, metric.replace("_", " "))

    def samples_of(self, metric: str, evaluated: int) -> int:
        """Return the samples that a metric is of, among those of an evaluation: every k-th, where it is generated.

        >>> TaskFacts("t", "t", "token", Metric("chrf", "max"), generated=("chrf",), generation_samples=256).samples_of(
        ...     "chrf", 1000
        ... )
        250
        """
        if metric not in self.generated or not self.generation_samples:
            return evaluated
        return -(-evaluated // sampling_interval(self.generation_samples, evaluated))

    def speed(self, samples_per_s: float) -> tuple[str, float]:
        """Return what is counted per second, and how many: units where each sample has as many, else samples.

        >>> TaskFacts("t", "t", "token", Metric("loss", "min"), units_per_sample=128).speed(10.0)
        ('tokens/s', 1280.0)
        """
        if not self.units_per_sample:
            return "samples/s", samples_per_s
        return f"{self.speed_unit or self.unit}s/s", samples_per_s * self.units_per_sample


def sampling_interval(most: int, total: int) -> int:
    """Return k where every k-th of some samples is taken, so that at most `most` are; at least 1."""
    return max(1, -(-total // most))


BEFORE_TASKS = TaskFacts(
    "image_classification",
    "image_classification",
    "sample",
    Metric("top1", "max", "top-1", percent=True, noun="accuracy"),
    (Metric("macro_f1", "max", "macro F1"), Metric("roc_auc", "max", "ROC AUC")),
    (Metric("top5", "max", "top-5", percent=True),),
    "top-1",
)
"""What records that name no task are of."""
