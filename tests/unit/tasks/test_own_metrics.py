"""Metrics of torchmetrics beside a task's: named, given as objects, and compared by."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torchmetrics
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score

from echelon.config import build
from echelon.core.errors import UserError
from echelon.core.task import Metric
from echelon.data.base import DataInfo
from echelon.tasks.base import EvaluationResult, Task
from echelon.tasks.image_classification import ImageClassification
from echelon.tasks.language_modelling import LanguageModelling
from echelon.tasks.nest import TensorSpec
from echelon.tasks.own_metrics import LOSS, OwnMetrics, choose_primary, named, read_metrics
from echelon.tasks.recommendation import PairPrediction
from echelon.tasks.registry import TaskChoice, TaskObjects
from echelon.tasks.segmentation import Segmentation
from echelon.tasks.tailored import TailoredTask

CPU = torch.device("cpu")

DATA = DataInfo("toy", ("a", "b", "c"), 1, 8, 6, 6, (2, 2, 2))
NUMBERS = DataInfo("toy", (), 1, 8, 6, 6, (), targets=TensorSpec((), "float32"))
LOGITS = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
TARGETS = torch.tensor([0, 1, 2, 0, 1, 2])
F1 = "F1Score(average=macro)"


def choice(**settings: Any) -> TaskChoice:
    return TaskChoice.of(build(None, settings).config)


def test_named_metrics_stand_beside_the_tasks_and_one_is_the_primary() -> None:
    task = choice(**{"training.metrics": F1, "training.primary_metric": "f1_score"}).fitted(DATA)
    facts = task.facts()
    assert (facts.primary.name, facts.primary.direction, facts.name) == ("f1_score", "max", "image_classification")
    assert "top1" in {metric.name for metric in facts.headlines} and facts.score_label == "top-1"
    metrics = task.metrics(torch.device("cpu"))
    for part in (slice(0, 4), slice(4, 6)):
        metrics.update(LOGITS[part], TARGETS[part])
    result = metrics.compute()
    assert result.metrics["f1_score"] == pytest.approx(result.metrics["macro_f1"], abs=1e-6)
    assert result.detail["classes"] == ["a", "b", "c"]


def test_any_targets_are_learnt_with_a_loss_of_ones_own() -> None:
    task = choice(**{"optimizer.loss": "MSELoss", "training.metrics": "MeanAbsoluteError"}).fitted(NUMBERS)
    outputs, targets = torch.tensor([[1.0], [2.0]]), torch.tensor([0.0, 4.0])
    metrics = task.metrics(torch.device("cpu"))
    metrics.update(outputs.squeeze(-1), targets)
    assert task.facts().primary.name == "loss" and task.facts().name == "supervised"
    assert metrics.compute().metrics == {"mean_absolute_error": 1.5, "loss": 2.5}
    with pytest.raises(UserError, match="--task supervised needs --loss"):
        choice(task="supervised").fitted(NUMBERS)


def test_the_loss_is_counted_where_another_metric_is_the_primary_one() -> None:
    settings = {"optimizer.loss": "L1Loss", "training.metrics": "MeanSquaredError"}
    task = choice(**settings, **{"training.primary_metric": "mean_squared_error"}).fitted(NUMBERS)
    metrics = task.metrics(torch.device("cpu"))
    metrics.update(torch.tensor([1.0, 2.0]), torch.tensor([0.0, 4.0]))
    assert metrics.compute().metrics == {"mean_squared_error": 2.5, "loss": 1.5}


def test_outputs_that_are_no_tensor_are_refused_where_a_tasks_metrics_need_one() -> None:
    outputs, settings = {"scores": LOGITS}, {"optimizer.loss": "CrossEntropyLoss"}
    said = choice(**settings).fitted(DATA).wrong_outputs(outputs, 6)
    assert "must return logits of shape (batch, 3)" in said and "task=supervised" in said
    assert choice(**settings).fitted(DATA).wrong_outputs({"logits": LOGITS}, 6) == "", "which are taken out of it"
    assert choice(**settings).fitted(DATA).wrong_outputs(LOGITS[:, :2], 6) == ""
    assert choice(task="supervised", **settings).fitted(DATA).wrong_outputs(outputs, 6) == ""


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (MulticlassF1Score(3), ["multiclass_f1_score"]),
        ([MulticlassF1Score(3), MulticlassAccuracy(3)], ["multiclass_f1_score", "multiclass_accuracy"]),
        ({"mine": MulticlassF1Score(3)}, ["mine"]),
        (torchmetrics.MetricCollection({"a": MulticlassF1Score(3), "b": MulticlassAccuracy(3)}), ["a", "b"]),
    ],
)
def test_objects_have_names(given: Any, names: list[str]) -> None:
    assert list(named(given)) == names
    task = choice().fitted(DATA, TaskObjects(metrics=given))
    metrics = task.metrics(torch.device("cpu"))
    metrics.update(LOGITS, TARGETS)
    assert set(names) < set(metrics.compute().metrics)


@pytest.mark.parametrize(
    ("text", "name", "direction"),
    [("", "top1", "max"), ("loss", "loss", "min"), ("macro_f1", "macro_f1", "max"), ("e(min)", "e", "min")],
)
def test_the_primary_metric_has_a_direction(text: str, name: str, direction: str) -> None:
    primary = choose_primary(text, ImageClassification(), {})
    assert (primary.name, primary.direction) == (name, direction)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"training.metrics": "F1Scor"}, r"unknown --metrics 'F1Scor': did you mean F1Score\?"),
        ({"training.metrics": "F1Score(avrage=macro)"}, "avrage"),
        ({"training.metrics": "MeanSquaredError+MeanSquaredError"}, "metrics have one name"),
        (
            {"training.primary_metric": "topone"},
            "unknown --primary-metric 'topone'.*known: loss, macro_f1,",
        ),
        ({"training.primary_metric": "loss(up)"}, r"write the side that is better: loss\(min\) or loss\(max\)"),
        ({"training.metrics": "CatMetric", "training.primary_metric": "cat_metric"}, "write the side that is better"),
        (
            {"optimizer.loss": "MSELoss", "optimizer.label_smoothing": 0.1},
            "are for the task's own loss",
        ),
    ],
)
def test_what_does_not_fit_is_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        choice(**settings).fitted(DATA)


def test_a_metric_that_is_no_number_is_refused() -> None:
    metrics = choice(**{"training.metrics": "F1Score(average=none)"}).fitted(DATA).metrics(torch.device("cpu"))
    metrics.update(LOGITS, TARGETS)
    with pytest.raises(UserError, match=r"metric f1_score gives \[3\]: an evaluation's metric is one number"):
        metrics.compute()


def test_metrics_of_names_know_the_classes() -> None:
    assert (
        read_metrics("MulticlassAccuracy", ImageClassification().metric_arguments(3))["multiclass_accuracy"].num_classes
        == 3
    )


def test_a_binary_metric_takes_the_probability_of_the_second_of_two_classes() -> None:
    data = DataInfo("d", ("no", "yes"), 1, 1, 8, 8, (4, 4), shape=(2,), dtype="float32")
    wanted = choice(**{"training.metrics": "F1Score(task=binary)+BinaryAUROC"})
    metrics = wanted.fitted(data).metrics(torch.device("cpu"))
    logits, targets = torch.tensor([[2.0, 0.0], [0.0, 1.0], [0.0, 3.0], [1.0, 0.5]]), torch.tensor([0, 1, 0, 1])
    metrics.update(logits, targets)
    found = metrics.compute().metrics
    assert found["f1_score"] == pytest.approx(0.5) and found["binary_auroc"] == pytest.approx(0.5)


def test_a_binary_metric_of_two_labels_takes_both() -> None:
    data = replace(NUMBERS, targets=TensorSpec((2,), "float32"), task="multi_label", classes=("a", "b"))
    wanted = TaskChoice.of(build(None, {"training.metrics": "BinaryAccuracy", "task": "multi-label"}).config)
    metrics = wanted.fitted(data).metrics(torch.device("cpu"))
    metrics.update(torch.tensor([[2.0, -1.0], [-1.0, 3.0]]), torch.tensor([[1.0, 0.0], [1.0, 1.0]]))
    assert metrics.compute().metrics["binary_accuracy"] == pytest.approx(0.75)


def own_metrics(task: Task, text: str) -> OwnMetrics:
    metrics = read_metrics(text, task.metric_arguments(3))
    return OwnMetrics(TailoredTask(task, None, metrics, task.primary), task.metrics(CPU), metrics, CPU)


def test_metrics_of_labels_judge_each_label() -> None:
    data = replace(NUMBERS, targets=TensorSpec((3,), "float32"), task="multi_label", classes=("a", "b", "c"))
    text = "F1Score+Accuracy+HammingDistance+AUROC+MultilabelAveragePrecision"
    metrics = choice(task="multi-label", **{"training.metrics": text}).fitted(data).metrics(CPU)
    targets = torch.tensor([[0.0, 0.0, 1.0], [1.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    metrics.update(targets * 10 - 5, targets)
    assert {name: metrics.compute().metrics[name] for name in ("f1_score", "accuracy", "auroc")} == {
        "f1_score": 1.0, "accuracy": 1.0, "auroc": 1.0,
    }  # fmt: skip
    assert metrics.compute().metrics["hamming_distance"] == 0.0
    assert metrics.compute().metrics["multilabel_average_precision"] == 1.0


def test_pixels_that_count_nothing_are_in_no_metric() -> None:
    targets = torch.tensor([[[0, 1], [2, 255]], [[0, 1], [-100, 2]]])
    outputs = {"out": 5 * torch.nn.functional.one_hot(targets.clamp(0, 2), 3).movedim(-1, 1).float()}
    outputs["out"][0, :, 1, 1] = torch.tensor([9.0, 0.0, 0.0])
    for text in ("Accuracy", "JaccardIndex", "F1Score(average=macro)", "CohenKappa", "Accuracy(ignore_index=255)"):
        metrics = own_metrics(Segmentation("abc"), text)
        metrics.update(outputs, targets)
        assert list(metrics.compute().metrics.values())[-1] == pytest.approx(1.0), text


def test_padding_is_in_no_metric_of_tokens() -> None:
    metrics = read_metrics("Perplexity", LanguageModelling().metric_arguments(0))
    own = OwnMetrics(TailoredTask(LanguageModelling(), None, metrics, LOSS), _Nothing(), metrics, CPU)
    logits, targets = torch.zeros(2, 4, 5), torch.tensor([[0, 1, 2, 3], [4, 0, -100, -100]])
    logits[targets == -100] = torch.tensor([9.0, 0.0, 0.0, 0.0, 0.0])
    own.update(logits, targets)
    assert own.compute().metrics["perplexity"] == pytest.approx(5.0)


def test_metrics_of_clicks_take_marks_as_floats() -> None:
    task = PairPrediction()
    task._clicks, task.primary = True, Metric("roc_auc", "max")
    own = own_metrics(task, "AveragePrecision+BinaryAUROC")
    own.update(torch.tensor([[2.0], [-1.0], [3.0]]), torch.tensor([1.0, 0.0, 1.0]))
    assert list(own.compute().metrics.values())[-2:] == [1.0, 1.0]


class _Nothing:
    def update(self, outputs: Any, targets: Any) -> None:
        pass

    def compute(self, group: Any = None) -> EvaluationResult:
        return EvaluationResult({}, {})
