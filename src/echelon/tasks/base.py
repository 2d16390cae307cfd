"""The contract of a task: what a batch is, what its loss sums over, how a model is judged.

The engine knows no task by name. To add one, write one file with a subclass of `Task` and `TASK = ThatClass`.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum, auto
from typing import Any, ClassVar, Protocol, Self, runtime_checkable

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from echelon.config import DataConfig
from echelon.core.errors import UserError
from echelon.core.figure import ReportSection
from echelon.core.spec import Value
from echelon.core.task import Metric, TaskDefaults, TaskFacts
from echelon.tasks import nest
from echelon.tasks.gathering import RowMessages
from echelon.tasks.nest import Nest


class Encoding(StrEnum):
    """What a task wants a source to make of the columns that it names as inputs and targets.

    A source that knows but one form, such as a folder of images, asks for none.
    """

    AUTO = auto()  # as the data itself suggests
    NUMBERS = auto()  # numbers as they are, strings as ids of categories, or texts; the target is a number, or several
    CLASSES = auto()  # likewise; the target is one of some classes
    LABELS = auto()  # likewise; the target is any number of labels
    IDS = auto()  # inputs are ids, such as users and items; the target is a number
    TEXT = auto()  # the input is text, the target one of some classes
    NEXT_TOKEN = auto()  # one text: the target of each token is the next one
    MASKED_TOKENS = auto()  # one text: the targets are some of its tokens, most of which are masked
    TEXT_PAIRS = auto()  # input and target are texts
    SPEECH = auto()  # the input is sound, the target one of some classes
    TRANSCRIPTS = auto()  # the input is sound, the target text
    MASKS = auto()  # the input is an image, the target one of some classes for each pixel

    @property
    def reads_text(self) -> bool:
        """Whether what the model is given is cut from text."""
        return self in (Encoding.TEXT, Encoding.NEXT_TOKEN, Encoding.MASKED_TOKENS, Encoding.TEXT_PAIRS)

    @property
    def reads_sounds(self) -> bool:
        """Whether what the model is given is made of sounds."""
        return self in (Encoding.SPEECH, Encoding.TRANSCRIPTS)

    @property
    def judges_text(self) -> bool:
        """Whether, of data that is texts, each is judged as a whole: by a class, by labels or by numbers."""
        return self in (Encoding.TEXT, Encoding.LABELS, Encoding.NUMBERS)


NO_TARGET = -100
"""What stands in place of a target that counts nothing, as in torch's cross-entropy: padding, for instance."""

OF_TEXTS = TaskDefaults("adamw", 5e-3, 0.05, epochs=6, batch_size=64)
"""What tasks suggest for texts, whose model is the small classifier of texts with as many outputs as they have."""

SAMPLE = "sample"
"""The unit of a loss that is counted without being asked."""


@dataclass
class Batch:
    """One rank's part of a global batch.

    Args:
        inputs: what the model is called with: a tensor `(B, ...)`, a tuple of them (by position) or a dict (by name).
            A rank without samples has one of another rank, for models cannot run on none.
        targets: any nest of tensors `(B, ...)`; B may be 0.
        global_size: samples of the whole batch over all ranks, those that could not be decoded included.
        index: of the batch in its epoch.
        global_units: units of the loss in the whole batch, where the loader knows them; None: it does not.
        epoch: from 0.
        numbers: of the samples in the user's data, `(B,)`, for who asks (see `samples`); None: unknown, or these are
            mixtures.
        sizes: samples of each rank's part, in their order; empty: they differ by at most 1, the first have more.
        counted: gives the units of each rank's part, in their order, where these are being added up since a step
            earlier.
        left_out: why samples of this part were left out, which could not be read, by their places in it.
    """

    inputs: Nest
    targets: Nest
    global_size: int
    index: int
    global_units: int | None = None
    epoch: int = 0
    numbers: Callable[[], NDArray[np.int64]] | None = None
    sizes: tuple[int, ...] = ()
    counted: Callable[[], Sequence[int]] | None = None
    left_out: Mapping[int, str] = field(default_factory=dict)

    @property
    def samples(self) -> NDArray[np.int64] | None:
        """The numbers in the user's data of the samples in `targets`, `(B,)`; None: unknown, or they are mixtures."""
        return self.numbers() if self.numbers is not None else None


class TextDecoder(Protocol):
    """Makes text of ids again."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of some ids."""


@dataclass(frozen=True)
class TightSample:
    """The sample whose frames are the fewest for the labels that are to be aligned to them.

    Attributes:
        name: of its file.
        needed: frames that its labels need at least.
    """

    name: str
    frames: int
    needed: int


@dataclass(frozen=True)
class SentenceMarks:
    """The ids that stand before the first token of a sentence, and behind its last."""

    begin: int
    end: int


def are_tokens(inputs: Nest) -> bool:
    """Whether inputs are the tokens of texts: ids below a count, as many of each sample as it has."""
    return any(spec.ragged and spec.dtype == "int64" and spec.count for spec in nest.leaves(inputs))


class InputFacts(Protocol):
    """What a task chooses a model by."""

    @property
    def task(self) -> str:
        """Name of the task that the data is for."""

    @property
    def inputs(self) -> Nest:
        """A nest of `TensorSpec`: what the model is given of one sample."""


@dataclass(frozen=True)
class TargetValues:
    """What values the targets of data from Python were seen to have.

    Attributes:
        span: the least and the greatest; of whole numbers without 255 and -100, which stand for no class.
        marks: whether all are 0 or 1.
        one_hot: whether each sample has several, one of which is 1 and all others 0.
    """

    span: tuple[float, float]
    marks: bool
    one_hot: bool


class DataFacts(InputFacts, Protocol):
    """What a task asks of the data."""

    @property
    def name(self) -> str:
        """Name of the data set, as its spec has it."""

    @property
    def classes(self) -> tuple[str, ...]:
        """Names by label; empty where targets are no classes."""

    @property
    def class_counts(self) -> tuple[int, ...]:
        """Training samples of each class; of masks, pixels."""

    @property
    def targets(self) -> Nest:
        """A nest of `TensorSpec`: what one sample's targets are."""

    @property
    def label_span(self) -> tuple[int, int] | None:
        """The least and the greatest of targets that are whole numbers without names."""

    @property
    def task(self) -> str:
        """Name of the task that the data is for, as it tells by itself."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of a table's columns that inputs are made of; empty: it is no table."""

    @property
    def target_values(self) -> TargetValues | None:
        """What values of targets were seen; None: nobody looked, or they are several tensors."""

    @property
    def target_names(self) -> tuple[str, ...]:
        """Names of targets that are numbers; empty where they have none."""

    @property
    def target_mean(self) -> tuple[float, ...]:
        """Of targets that are numbers, over the training samples; empty where they are learnt as they come."""

    @property
    def target_std(self) -> tuple[float, ...]:
        """Likewise, the standard deviation."""

    @property
    def mean(self) -> tuple[float, ...]:
        """Per channel of images, of pixels in 0..1, as they are normalised with; empty where they are not."""

    @property
    def std(self) -> tuple[float, ...]:
        """Likewise, the standard deviation."""

    @property
    def tokeniser(self) -> TextDecoder | None:
        """What texts were cut with; None where there are none."""

    @property
    def tightest(self) -> TightSample | None:
        """Of sounds with transcripts, the one that a model may shorten least; None where there are none."""

    @property
    def marks(self) -> SentenceMarks | None:
        """The ids that begin and end a sentence that a model is to write; None: it writes none."""


@dataclass(frozen=True)
class TargetNames:
    """What the outputs of a model for some data stand for, in their order.

    Attributes:
        noun: of several of them.
        names: empty where nothing names them.
        are_numbers: samples have the number of one of them, by which the model knows it.
    """

    noun: str
    names: tuple[str, ...]
    are_numbers: bool

    @classmethod
    def of(cls, data: DataFacts) -> TargetNames:
        """Return those of data."""
        return cls("classes", data.classes, True) if data.classes else cls("targets", data.target_names, False)

    def are_numbered_as(self, other: TargetNames) -> bool:
        """Whether a number is the same in both; so it is where neither has numbers."""
        return self.names == other.names or not (self.are_numbers or other.are_numbers)


@dataclass(frozen=True)
class TaskSettings:
    """What the description of a run says of losses, and how many samples its report shows."""

    label_smoothing: float = 0.0
    class_weights: str = "none"
    worst_samples: int = 0


@dataclass(frozen=True)
class EvaluationResult:
    """What an evaluation gave, in plain values for JSON.

    Attributes:
        metrics: the primary one among them; None: undefined.
        detail: what the task's sections are made of, and what other programs may read in `evaluation.json`.
    """

    metrics: Mapping[str, float | None]
    detail: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class ChosenSample:
    """A sample of this rank's part of the evaluation set that `Task.generated` is asked for.

    Attributes:
        place: in the evaluation set.
        inputs, targets: nests of tensors `(1, ...)`.
    """

    place: int
    inputs: Nest
    targets: Nest


@dataclass(frozen=True)
class Generated:
    """What outputs of many forward passes gave, such as texts.

    Attributes:
        metrics: beside those of `Metrics`.
        section: that reports show; None: nothing.
    """

    metrics: Mapping[str, float | None] = field(default_factory=dict)
    section: ReportSection | None = None


@dataclass(frozen=True)
class Prediction:
    """What a model says of one sample, in plain values.

    Attributes:
        value: a class, labels, a number or several by the names of targets, a text; else the outputs as they are.
        probability: of the class that is the value; None: it is no class.
        probabilities: of every class, by its name.
        mask: the class number of each pixel `(H, W)`; None: it is of no image, or was written to a file.
    """

    value: Any
    probability: float | None = None
    probabilities: Mapping[str, float] = field(default_factory=dict)
    mask: NDArray[np.uint8] | None = None


@dataclass(frozen=True)
class Writing:
    """How a model writes a text on.

    Attributes:
        most_tokens: that it adds.
        temperature: of the distribution that tokens are drawn from; 0: the likeliest one is taken.
    """

    most_tokens: int = 100
    temperature: float = 0.0
    seed: int = 0


class Metrics(Protocol):
    """Collects what a rank's part of the evaluation set gave; then makes metrics of all ranks' parts."""

    def update(self, outputs: Any, targets: Nest) -> None:
        """Count a batch: the model's outputs and the targets, B samples each; B may be 0."""

    def compute(self, group: dist.ProcessGroup | None = None) -> EvaluationResult:
        """Return the metrics, the same on every rank of `group`; all call it, with or without samples."""


@runtime_checkable
class StreamedMetrics(Protocol):
    """Metrics that need all ranks' rows at once, which travel while more of them are made."""

    def stream(self, messages: RowMessages, samples: int) -> None:
        """Let rows travel in such messages; all ranks call it before the first batch.

        Args:
            samples: of the evaluation set, over all ranks, at most.
        """

    def flush(self) -> None:
        """Begin the last messages; all ranks call it after the last batch, before any other collective."""


@dataclass(frozen=True)
class PendingSection:
    """What a report shows of samples, once it has come together from all ranks.

    Attributes:
        make: returns it on the first rank of the group; None elsewhere, and where there is nothing to show.
        works: what it waits for.
    """

    make: Callable[[], ReportSection | None]
    works: Sequence[dist.Work] = ()

    @property
    def is_complete(self) -> bool:
        """Whether `result` waits for nothing."""
        return all(work.is_completed() for work in self.works)

    def result(self) -> ReportSection | None:
        """Wait for what is on its way, and return the section."""
        for work in self.works:
            work.wait()
        return self.make()


class Examples(Protocol):
    """Chooses a bounded number of evaluation samples for a report, the same for any number of ranks."""

    def update(self, inputs: Nest, outputs: Any, targets: Nest, first: int, numbered: bool) -> None:
        """Look at a batch of this rank's part, B samples; B may be 0.

        Args:
            first: place of its first sample in the evaluation set.
            numbered: whether that is also its number there; not where some samples could not be decoded.
        """

    def section(self, group: dist.ProcessGroup | None = None) -> PendingSection:
        """Begin to bring together what a report shows; all ranks of `group` call it, with or without samples."""


class Task(ABC):
    """What is learnt from what, and how it is judged. Subclasses are pickled to workers.

    Attributes:
        name: in specs, records and reports.
        unit: what the loss is a sum over: sample, token, pair.
        units_per_sample: where all samples have as many, so that speeds are shown in units; 0: they differ.
        speed_unit: what speeds count `units_per_sample` of, where that is not the unit of the loss.
        primary: the metric by which checkpoints and candidates are compared.
        curves: metrics that are drawn beside the primary one.
        headlines: further metrics that people look at first, the most telling one first.
        score_label: the share of samples that `training_score` counts, for people; empty: nothing is counted.
        takes_records: whether the loss is given all that a model returns, where that is a record with logits in it.
        takes_shares: whether targets may be shares of the classes `(B, C)`, as mixup makes them of class numbers.
        needs_loss: it has no loss but one of the user's own (`--loss`).
        encoding: what it wants a source to make of columns.
        defaults: settings in place of the general defaults, where the user says nothing.
        default_model: what `--model auto` becomes whatever the data; empty: `auto_model` tells.
        table_model: what it becomes for the columns of a table.
        generates: metrics that `generated` gives, and `metrics` does not.
        generation_samples: how many samples `generated` is given over all ranks, at most; 0: none.
    """

    name: ClassVar[str]
    unit: ClassVar[str] = SAMPLE
    units_per_sample: int = 0
    speed_unit: ClassVar[str] = ""
    primary: Metric
    headlines: ClassVar[tuple[Metric, ...]] = ()
    curves: ClassVar[tuple[Metric, ...]] = ()
    score_label: ClassVar[str] = ""
    takes_shares: ClassVar[bool] = False
    takes_records: ClassVar[bool] = False
    needs_loss: ClassVar[bool] = False
    encoding: ClassVar[Encoding] = Encoding.AUTO
    defaults: ClassVar[TaskDefaults] = TaskDefaults()
    default_model: ClassVar[str] = ""
    table_model: ClassVar[str] = ""
    generates: ClassVar[tuple[Metric, ...]] = ()
    generation_samples: ClassVar[int] = 0

    def defaults_for(self, data: DataConfig, inputs: InputFacts | None = None) -> TaskDefaults:
        """Return the defaults for some description of data.

        Args:
            inputs: what is known of them before the data is opened; None: nothing.
        """
        return self.defaults

    def facts(self) -> TaskFacts:
        """Return what a record says of the task."""
        kind = type(self)
        built_in = kind.__module__.startswith("echelon.tasks.")
        spec = kind.__module__.rpartition(".")[2] if built_in else f"{kind.__module__}:{kind.__qualname__}"
        labels = self.primary, self.headlines, self.curves, self.score_label
        return TaskFacts(
            self.name, spec, self.unit, *labels, units_per_sample=self.units_per_sample,
            generated=tuple(metric.name for metric in self.generates), generation_samples=self.generation_samples,
            speed_unit=self.speed_unit,
        )  # fmt: skip

    def fitted(self, data: DataFacts, settings: TaskSettings) -> Self:
        """Return the task for some data.

        Raises:
            UserError: the data is of another task, or a setting does not fit; says what does.
        """
        if settings.label_smoothing or settings.class_weights not in ("none", ""):
            raise UserError(f"--label-smoothing and --class-weights are for classes; the task is {self.name}")
        return copy.copy(self)

    def for_evaluation(self) -> Self:
        """Return the task as evaluations sum its losses: without label smoothing and class weights.

        So losses of runs with other settings compare, and decide which of equal checkpoints is the best.
        """
        return self

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

    def examples(self) -> Examples | None:
        """Return a new choice of samples that reports show of an evaluation; None: they show none."""
        return None

    def generated(
        self, model: Callable[[Nest], Any], samples: Sequence[ChosenSample], group: dist.ProcessGroup | None
    ) -> Generated:
        """Return what outputs of many forward passes give: metrics, and what reports show.

        It is asked once an evaluation, on all ranks, and returns the same on each. Each must call the model as often
        as the others, with samples or without, for that may be collective.

        Args:
            model: takes inputs and returns outputs, in float32 or wider.
            samples: of this rank, of those `generation_samples` that lie evenly over the evaluation set.
            group: of the ranks that divide the evaluation set; None: there is one.
        """
        return Generated()

    def predict(self, model: Callable[[Nest], Any], inputs: Nest, writing: Writing) -> list[Prediction]:
        """Return what a model says of B samples without targets.

        Args:
            model: takes inputs and returns outputs, in float32 or wider.
            inputs: as sources of the task give them; of texts that are to be written on, their tokens and a mask.
        """
        return self.predictions(model(inputs))

    def predictions(self, outputs: Any) -> list[Prediction]:
        """Return what a model's outputs say of B samples; where the task knows no better, they are lists of numbers."""
        rows = [[leaf[i].tolist() for leaf in nest.leaves(outputs)] for i in range(nest.rows(outputs))]
        return [Prediction(row[0] if len(row) == 1 else row) for row in rows]

    def report_sections(self, result: EvaluationResult) -> Sequence[ReportSection]:
        """Return what reports show of an evaluation beside its metrics; one rank is asked, when it is the best."""
        return ()

    def auto_model(self, data: InputFacts) -> str:
        """Return the name of the model that `--model auto` becomes; empty: the one for images of the data's size."""
        return self.default_model

    def learnt(self, targets: Nest) -> Nest:
        """Return targets in the units of outputs, in which they are learnt: of a table, standard deviations."""
        return targets

    def given(self, outputs: Any) -> Any:
        """Return outputs in the units of the data's targets."""
        return outputs

    def for_metrics(self, outputs: Any, targets: Nest) -> tuple[Any, Nest]:
        """Return outputs and targets as metrics of torchmetrics compare them: in the data's units, `NO_TARGET` where
        nothing counts.
        """
        return self.given(nest.logits_in(outputs)), targets

    def metric_arguments(self, classes: int) -> Mapping[str, Value]:
        """Return arguments for metrics of torchmetrics that take such, where the user says nothing.

        Args:
            classes: of the data; 0: none.
        """
        known: dict[str, Value] = {"task": "multiclass", "num_classes": classes, "num_labels": classes}
        return (known if classes else {}) | ({} if self.unit == SAMPLE else {"ignore_index": NO_TARGET})

    @property
    def is_own(self) -> bool:
        """Whether the user wrote it, or its loss or metrics."""
        return not type(self).__module__.startswith(f"{__package__}.")

    def wrong_loss(self, outputs: Any, targets: Nest) -> str:
        """Say why a loss of the user's own cannot be computed; empty: it can, or there is none."""
        return ""

    def odd_outputs(self, outputs: Any) -> str:
        """Say what a model's outputs for some samples look like that its user can hardly mean; empty: nothing does."""
        return ""

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
