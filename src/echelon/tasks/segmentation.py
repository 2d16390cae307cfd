"""A class for each pixel of an image: cross-entropy per pixel, judged by the mean IoU of the classes.

Shapes: B samples, H W height and width, C classes.

Helps: Finding regions in images: organs, roads, fields.
Needs: a folder with `images/` and `masks/`: PNG files of class numbers with the images' names; 255 is ignored.
"""

from __future__ import annotations

import colorsys
import copy
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from echelon.core.errors import UserError
from echelon.core.figure import ReportPicture, ReportSection, ReportTable
from echelon.core.task import Metric, TaskDefaults
from echelon.tasks import nest
from echelon.tasks.base import (
    NO_TARGET,
    DataFacts,
    Encoding,
    EvaluationResult,
    Examples,
    Metrics,
    PendingSection,
    Prediction,
    Task,
    TaskSettings,
)
from echelon.tasks.classification import class_weights, probabilities_for_logits
from echelon.tasks.classification_metrics import computed, summed_over_ranks
from echelon.tasks.nest import Nest
from echelon.tasks.worst_samples import Pixels, Worst, data_uri

_IGNORED = 255  # in masks of at most 255 classes, as files have it
_MOST_CLASSES = 255
_AUX_WEIGHT = 0.5  # of an auxiliary head's loss, as in the training of torchvision's models
_GAP = 4  # pixels between the pictures of an image
_SCORES = 5  # of a sample: loss, place, number, share of right pixels, mean IoU
_COLOURS = {  # Okabe and Ito 2008, which people of any colour vision tell apart
    "black": (0, 0, 0), "orange": (230, 159, 0), "sky blue": (86, 180, 233), "green": (0, 158, 115),
    "yellow": (240, 228, 66), "blue": (0, 114, 178), "red": (213, 94, 0), "pink": (204, 121, 167),
}  # fmt: skip
_NO_CLASS = (255, 255, 255)


class Segmentation(Task):
    """Logits `(B, C, H, W)` and class numbers `(B, H, W)`; pixels of 255 or -100 are not counted.

    The loss is the sum over pixels of w_t * l, where l is the pixel's cross-entropy and w_t the weight of its class.
    The engine divides it by the counted pixels of the global batch. If a model returns a dict, `out` is the logits, and
    the loss of `aux`, an auxiliary head, is added with weight 0.5.

    Args:
        classes: names of the C classes, where the data names none.
    """

    name = "segmentation"
    unit = "pixel"
    primary = Metric("miou", "max", "mIoU")
    headlines = (Metric("dice", "max", "Dice"), Metric("pixel_accuracy", "max", "pixel accuracy"))
    curves = (Metric("pixel_accuracy", "max", "pixel accuracy"),)
    encoding = Encoding.MASKS
    default_model: ClassVar[str] = "small_unet"
    defaults: ClassVar[TaskDefaults] = TaskDefaults("adamw", 2e-3, 1e-2, epochs=40, batch_size=16)

    def __init__(self, classes: Sequence[str] = ()) -> None:
        self.classes = tuple(classes)
        self._size: tuple[int, ...] = ()
        self._smoothing, self._weights = 0.0, torch.zeros(0)
        self._worst_samples = 0
        self._pixels: Pixels | None = None

    def fitted(self, data: DataFacts, settings: TaskSettings) -> Self:
        """Return the task for some data.

        Raises:
            UserError: targets are no class numbers of pixels, the data names no classes, or class weights do not fit.
        """
        specs = nest.leaves(data.targets)
        whole = specs[0].dtype.removeprefix("u").startswith("int")
        if len(specs) != 1 or len(specs[0].shape) != 2 or specs[0].ragged or not whole:
            raise UserError(
                f"data {data.name}: targets are {nest.describe(data.targets)}, and --task segmentation needs the class "
                "of each pixel: give a folder with images/ and masks/, or int64 class numbers of shape (height, width)"
            )
        task = copy.copy(self)
        task.classes = data.classes or self.classes
        if len(task.classes) < 2:
            raise UserError(
                f"data {data.name} names no classes: give task=Segmentation(classes=[...]) of "
                "echelon.tasks.segmentation, or a folder with images/ and masks/"
            )
        if len(task.classes) > _MOST_CLASSES:
            raise UserError(
                f"{len(task.classes)} classes: a segmentation has at most {_MOST_CLASSES}, masks are numbers of 8 bits "
                "and 255 stands for no class"
            )
        values = data.target_values
        if values is not None and not (values.span[0] >= 0 and values.span[1] < len(task.classes)):
            raise UserError(
                f"data {data.name}: masks have numbers from {values.span[0]:g} to {values.span[1]:g}, and the "
                f"{len(task.classes)} classes are 0 to {len(task.classes) - 1}: name all of them; 255 or -100 stands "
                "for no class"
            )
        weights = class_weights(settings.class_weights, data.class_counts or (1,) * len(task.classes))
        task._weights = torch.zeros(0) if weights is None else torch.tensor(weights)
        task._smoothing, task._worst_samples = settings.label_smoothing, settings.worst_samples
        task._size, task._pixels = specs[0].shape, Pixels.of(data.inputs, data.mean, data.std)
        return task

    def for_evaluation(self) -> Self:
        """Return the task without label smoothing and class weights."""
        task = copy.copy(self)
        task._smoothing, task._weights = 0.0, torch.zeros(0)
        return task

    @property
    def outputs(self) -> int:
        """One logit a class, for each pixel."""
        return len(self.classes)

    def loss_sum(self, outputs: Any, targets: Tensor) -> Tensor:
        """Return the sum of the losses over the pixels `(B, H, W)` that count, an auxiliary head's with weight 0.5."""
        total = self._losses(_logits(outputs), targets).sum()
        if isinstance(outputs, Mapping) and "aux" in outputs:
            total = total + _AUX_WEIGHT * self._losses(outputs["aux"], targets).sum()
        return total

    def _losses(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each pixel `(B, H, W)`, 0 where it counts nothing."""
        wanted = _wanted(targets)
        given, of_pixels = logits, wanted
        if logits.is_cuda and torch.are_deterministic_algorithms_enabled():  # of images torch has none that repeats
            given, of_pixels = logits.movedim(1, -1).flatten(0, -2), wanted.flatten()
        losses = F.cross_entropy(
            given, of_pixels, reduction="none", ignore_index=NO_TARGET, label_smoothing=self._smoothing
        ).view_as(wanted)
        return losses * self._weights.to(losses)[wanted.clamp(min=0)] if len(self._weights) else losses

    def units(self, targets: Tensor) -> int:
        """Return the number of pixels `(B, H, W)` that count."""
        return int((_wanted(targets) != NO_TARGET).sum())

    def metrics(self, device: torch.device) -> Metrics:
        """Return an accumulator of mean IoU, Dice and pixel accuracy."""
        return PixelMetrics(self.classes, device)

    def for_metrics(self, outputs: Any, targets: Tensor) -> tuple[Any, Tensor]:
        """Return logits `(B, C, H, W)` and class numbers `(B, H, W)`, `NO_TARGET` where a pixel counts nothing."""
        return _logits(outputs), _wanted(targets)

    def examples(self) -> Examples | None:
        """Return a choice of the images with the highest loss a pixel, beside their masks; None for no images."""
        if not self._worst_samples or self._pixels is None:
            return None
        return WorstMasks(self._worst_samples, self, self._pixels)

    def pixel_losses(self, outputs: Any, targets: Tensor) -> Tensor:
        """Return the mean loss of the pixels of each sample that count `(B,)`; 0 of a sample that has none."""
        losses = self._losses(_logits(outputs), targets).flatten(1).sum(1)
        return losses / (_wanted(targets) != NO_TARGET).flatten(1).sum(1).clamp(min=1)

    def predictions(self, outputs: Any) -> list[Prediction]:
        """Return the likeliest class of each pixel, and the share of pixels of each class."""
        masks = _logits(outputs).argmax(1).to(torch.uint8).cpu().numpy()
        return [Prediction(shares_of(mask, self.classes), mask=mask) for mask in masks]

    def report_sections(self, result: EvaluationResult) -> Sequence[ReportSection]:
        """Return the table of the classes."""
        detail = result.detail
        counted = max(1, sum(detail["pixels"]))
        columns = zip(detail["classes"], detail["iou"], detail["dice"], detail["pixels"], strict=True)
        rows = [
            [str(name), _share(iou), _share(dice), f"{pixels / counted:.1%}"] for name, iou, dice, pixels in columns
        ]
        head = ("class", "IoU", "Dice", "of the pixels")
        summary = f"{len(rows)} classes" if len(rows) > len(_COLOURS) else ""
        notes = [
            "IoU is the pixels that are the class and predicted as such, over those that are either; mIoU and Dice are "
            "means over classes that are there or were predicted. Pixels that are ignored count nowhere."
        ]
        return [ReportSection("Classes of pixels", tables=[ReportTable("Classes", head, rows, summary)], notes=notes)]

    def odd_outputs(self, outputs: Any) -> str:
        """Say that outputs are probabilities, as of a model that ends in a softmax."""
        return probabilities_for_logits(_logits(outputs), 1)

    def wrong_outputs(self, outputs: Any, samples: int) -> str:
        """Say what is wrong with a model's outputs."""
        logits = _logits(outputs)
        shape = list(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
        height, width = self._size
        if shape == [samples, len(self.classes), height, width]:
            return ""
        return (
            f"must return logits of shape (batch, {len(self.classes)}, {height}, {width}), one for each class and "
            f"pixel, as small_unet and torchvision/fcn_resnet50 do; for a batch of {samples} it returned {shape}"
        )


TASK = Segmentation


class PixelMetrics:
    """Counts pixels by true and predicted class; the numbers made of the counts are torchmetrics'."""

    def __init__(self, classes: Sequence[str], device: torch.device) -> None:
        """Begin with no pixels."""
        from torchmetrics.classification import MulticlassConfusionMatrix

        self._classes, self._count = list(classes), len(classes)
        self._confusion = MulticlassConfusionMatrix(
            self._count, ignore_index=NO_TARGET, validate_args=False, sync_on_compute=False
        ).to(device)

    def update(self, outputs: Any, targets: Tensor) -> None:
        """Count a batch: logits `(B, C, H, W)` and class numbers `(B, H, W)`; B may be 0."""
        if len(targets):
            self._confusion.update(_logits(outputs).detach().argmax(1), _wanted(targets))

    def compute(self, group: dist.ProcessGroup | None = None) -> EvaluationResult:
        """Return the metrics over the pixels of all ranks of `group`; all call it.

        Returns:
            metrics: miou, dice, pixel_accuracy, in 0..1, None without pixels; and the detail: classes, iou, dice (None
            of a class that is neither there nor predicted) and pixels, by class.
        """
        from torchmetrics.classification import MulticlassF1Score, MulticlassJaccardIndex

        own = cast(dict[str, Tensor], self._confusion.metric_state)["confmat"]
        (confusion,) = summed_over_ranks([own], group)
        there, predicted, right = confusion.sum(1), confusion.sum(0), confusion.diagonal()
        stats = {"tp": right, "fp": predicted - right, "fn": there - right}
        stats["tn"] = confusion.sum() - right - stats["fp"] - stats["fn"]
        if not confusion.sum():
            nothing: list[float | None] = [None] * self._count
            metrics: dict[str, float | None] = dict.fromkeys(("miou", "dice", "pixel_accuracy"))
            return EvaluationResult(metrics, self._detail(nothing, nothing, there))
        options: dict[str, Any] = {"num_classes": self._count, "validate_args": False, "sync_on_compute": False}
        of_confusion, of_stats = {"confmat": confusion}, stats
        metrics = {
            "miou": float(computed(MulticlassJaccardIndex(average="macro", **options), of_confusion)),
            "dice": float(computed(MulticlassF1Score(average="macro", **options), of_stats)),
            "pixel_accuracy": float(right.sum() / confusion.sum()),
        }
        known = ((there + predicted) > 0).tolist()
        iou = _defined(computed(MulticlassJaccardIndex(average=None, **options), of_confusion), known)
        dice = _defined(computed(MulticlassF1Score(average=None, **options), of_stats), known)
        return EvaluationResult(metrics, self._detail(iou, dice, there))

    def _detail(self, iou: list[float | None], dice: list[float | None], there: Tensor) -> dict[str, Any]:
        return {"classes": self._classes, "iou": iou, "dice": dice, "pixels": there.tolist()}


class WorstMasks:
    """Chooses the k images of the highest loss a pixel among those of all ranks, beside their masks.

    Args:
        limit: k.
        task: fitted; tells the loss of each image.
        pixels: how inputs become pictures.
    """

    def __init__(self, limit: int, task: Segmentation, pixels: Pixels) -> None:
        self._limit, self._task, self._pixels = limit, task, pixels
        _, height, width = pixels.thumbnail
        self._worst = Worst(limit, _SCORES, (3, height, 3 * width + 2 * _GAP))

    def update(self, inputs: Nest, outputs: Any, targets: Tensor, first: int, numbered: bool) -> None:
        """Look at a batch, logits `(B, C, H, W)` and class numbers `(B, H, W)`; B may be 0."""
        if not len(targets):
            return
        losses = self._task.pixel_losses(outputs, targets).detach().double().nan_to_num(nan=torch.inf, posinf=torch.inf)
        worst = losses.sort(descending=True, stable=True).indices[: self._limit]
        predicted, wanted = _logits(outputs)[worst].argmax(1), _wanted(targets)[worst]
        counts = wanted != NO_TARGET
        right = ((predicted == wanted) & counts).flatten(1).sum(1) / counts.flatten(1).sum(1).clamp(min=1)
        places = worst + first
        numbers = places if numbered else torch.full_like(places, -1)
        scores = [losses[worst], places, numbers, right, self._ious(predicted, wanted)]
        pictures = self._pictures(nest.take(inputs, worst), wanted, predicted)
        self._worst.add(torch.stack([each.double() for each in scores], 1), pictures)

    def _ious(self, predicted: Tensor, wanted: Tensor) -> Tensor:
        """Return the mean IoU of each image `(n,)` over the classes that it has or that were predicted in it."""
        counts, sums = wanted != NO_TARGET, torch.zeros(2, len(wanted), device=wanted.device)
        for number in range(len(self._task.classes)):
            true, said = wanted == number, (predicted == number) & counts
            either = (true | said).flatten(1).sum(1)
            sums += torch.stack([(true & said).flatten(1).sum(1) / either.clamp(min=1), (either > 0).float()])
        return sums[0] / sums[1].clamp(min=1)

    def _pictures(self, inputs: Nest, wanted: Tensor, predicted: Tensor) -> Tensor:
        """Return each image, its mask and the prediction side by side `(n, 3, h, 3 w + 2 gaps)`, uint8 on the CPU."""
        _, height, width = self._pixels.thumbnail
        colours = torch.tensor([*class_colours(len(self._task.classes)).values(), _NO_CLASS], dtype=torch.uint8)
        whole = torch.full((len(wanted), 3, height, 3 * width + 2 * _GAP), 255, dtype=torch.uint8)
        whole[..., :width] = self._pixels.thumbnails(inputs)
        shown = predicted.masked_fill(wanted == NO_TARGET, NO_TARGET)
        for i, mask in enumerate((wanted, shown), start=1):
            small = F.interpolate(mask[:, None].float(), (height, width), mode="nearest-exact")[:, 0].long().cpu()
            left = i * (width + _GAP)
            whole[..., left : left + width] = colours[small.masked_fill(small < 0, len(colours) - 1)].movedim(-1, 1)
        return whole

    def section(self, group: dist.ProcessGroup | None = None) -> PendingSection:
        """Begin to bring together all ranks' worst images; all ranks of `group` call it."""
        return self._worst.of_all(group).section(self._section)

    def _section(self, scores: Tensor, pictures: Tensor) -> ReportSection:
        shown = []
        for (loss, _, number, right, iou), image in zip(scores.tolist(), pictures, strict=True):
            which = f", sample {int(number)} of the evaluation data" if number >= 0 else ""
            lines = (f"mIoU {iou:.2f}, {right:.1%} of its pixels right", f"loss {loss:.3g} a pixel{which}")
            shown.append(ReportPicture(data_uri(image.numpy()), lines, wide=True))
        note = (
            f"The {len(shown)} images of the evaluation set with the highest loss a pixel: the image as the model sees "
            f"it, its mask, and what was predicted. {self._legend()}; white is ignored."
        )
        return ReportSection("Worst-predicted images", pictures=shown, notes=[note])

    def _legend(self) -> str:
        named = list(zip(_COLOURS, self._task.classes, strict=False))
        rest = "; other classes have colours of their own" if len(self._task.classes) > len(named) else ""
        return "Colours: " + ", ".join(f"{colour} is {name}" for colour, name in named) + rest


def shares_of(mask: NDArray[np.uint8], classes: Sequence[str]) -> dict[str, float]:
    """Return the share of each class of the pixels of a mask `(H, W)`."""
    counts = np.bincount(mask.ravel(), minlength=len(classes)) / max(1, mask.size)
    return dict(zip(classes, counts.tolist(), strict=True))


def class_colours(count: int) -> dict[int, tuple[int, int, int]]:
    """Return a colour of each class, 0 to 255: eight that anyone tells apart, then hues by the golden ratio."""
    colours = dict(enumerate(list(_COLOURS.values())[:count]))
    for number in range(len(colours), count):
        hue = colorsys.hsv_to_rgb(number * 0.618034 % 1, 0.45 + 0.5 * (number % 2), 0.9)
        red, green, blue = (np.array(hue) * 255).round().astype(int).tolist()
        colours[number] = (red, green, blue)
    return colours


def _logits(outputs: Any) -> Any:
    """Return the logits of a model that gives more beside them, as those of torchvision and transformers do."""
    if isinstance(outputs, Mapping):
        return outputs.get("out", outputs)
    return getattr(outputs, "logits", outputs)


def _wanted(targets: Tensor) -> Tensor:
    """Return class numbers as int64, -100 where they are ignored."""
    wide = targets.long()
    return wide.masked_fill(wide == _IGNORED, NO_TARGET)


def _defined(values: Tensor, known: Sequence[bool]) -> list[float | None]:
    """Return the values of classes that are there or were predicted; None of others."""
    return [value if there else None for value, there in zip(values.flatten().tolist(), known, strict=True)]


def _share(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
