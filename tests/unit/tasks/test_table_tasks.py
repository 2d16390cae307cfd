"""Metrics of regression, several labels and recommendation, held against scikit-learn."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from sklearn import metrics as reference
from torch.nn.functional import binary_cross_entropy_with_logits
from torch.utils.data import TensorDataset
from torchmetrics import MeanSquaredError
from torchmetrics.functional.retrieval import retrieval_hit_rate, retrieval_normalized_dcg

from echelon.core.errors import UserError
from echelon.core.task import Metric
from echelon.data import from_datasets
from echelon.data.base import DataInfo
from echelon.tasks.base import NO_TARGET, EvaluationResult, Task, TaskSettings
from echelon.tasks.nest import TensorSpec
from echelon.tasks.recommendation import ranks_of
from echelon.tasks.registry import build_task
from echelon.tasks.regression import regression_scores
from echelon.tasks.tailored import TailoredTask

CPU = torch.device("cpu")
N = 57


def info(targets: TensorSpec, several: Sequence[TensorSpec] | None = None, **facts: object) -> DataInfo:
    shape = None if several else (4,)
    several = tuple(several) if several else None
    return DataInfo("rows", (), 1, 1, N, N, (), shape=shape, several=several, targets=targets, **facts)  # type: ignore[arg-type]


def fitted(name: str, data: DataInfo) -> Task:
    return build_task(name).fitted(data, TaskSettings())


def evaluated(task: Task, outputs: torch.Tensor, targets: torch.Tensor) -> EvaluationResult:
    accumulator = task.metrics(CPU)
    for part in zip(outputs.split(10), targets.split(10), strict=True):
        accumulator.update(*part)
    accumulator.update(outputs[:0], targets[:0])
    return accumulator.compute()


@pytest.mark.parametrize("count", [1, 3])
def test_regression_metrics_are_in_the_units_of_the_data(count: int) -> None:
    mean, std = tuple(100.0 * (i + 1) for i in range(count)), tuple(10.0 + i for i in range(count))
    shape = () if count == 1 else (count,)
    task = fitted("regression", info(TensorSpec(shape), target_mean=mean, target_std=std))
    torch.manual_seed(0)
    outputs = torch.randn(N, count)
    true = (torch.randn(N, count) * 0.1 + outputs) * torch.tensor(std) + torch.tensor(mean)
    result = evaluated(task, outputs, true.reshape(N, *shape))
    predicted, wanted = (outputs * torch.tensor(std) + torch.tensor(mean)).numpy(), true.numpy()
    assert result.metrics["rmse"] == pytest.approx(reference.mean_squared_error(wanted, predicted) ** 0.5, rel=1e-5)
    assert result.metrics["mae"] == pytest.approx(reference.mean_absolute_error(wanted, predicted), rel=1e-5)
    assert result.metrics["r2"] == pytest.approx(reference.r2_score(wanted, predicted), rel=1e-5)
    sections = task.report_sections(result)
    assert len(sections[0].charts) == 2 * count and len(sections[0].tables) == (count > 1)


def test_targets_of_a_billion_are_compared_in_float64() -> None:
    """In float32 numbers of this size are multiples of 64: an error of a quarter would be none."""
    task = fitted("regression", info(TensorSpec((), "float64")))
    true = 1e9 + torch.arange(N, dtype=torch.float64)
    result = evaluated(task, true + 0.25, true)
    assert result.metrics["rmse"] == result.metrics["mae"] == 0.25
    assert result.metrics["r2"] == pytest.approx(reference.r2_score(true, true + 0.25))
    assert result.detail["residuals"][0]["count"] == [N]
    assert task.predictions(true[:1])[0].value == 1e9


def test_units_of_a_table_are_converted_back_in_float64() -> None:
    """What float32 rounds is the output alone, in deviations: 1e-7 of them, not 1e-7 of the mean."""
    task = fitted("regression", info(TensorSpec(), target_mean=(2.0**30,), target_std=(1024.0,)))
    true = 2.0**30 + 128 * torch.arange(N, dtype=torch.float32)
    outputs = torch.arange(N, dtype=torch.float32) / 8 + 1 / 1024
    assert evaluated(task, outputs, true).metrics["mae"] == pytest.approx(1.0, rel=1e-4)
    assert task.predictions(outputs[:1])[0].value == 2.0**30 + 1


def test_a_target_of_small_numbers_is_judged_as_one_of_large_ones() -> None:
    targets = torch.arange(40, dtype=torch.float64)[:, None]
    outputs = targets + 5 * torch.randn(40, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    large, small = (regression_scores(scale * outputs, scale * targets)[0]["r2"] for scale in (1.0, 1e-6))
    assert small == pytest.approx(large) and 0 < small < 1


def test_the_loss_is_learnt_in_deviations_and_has_no_samples_of_nothing() -> None:
    task = fitted("regression", info(TensorSpec(), target_mean=(100.0,), target_std=(10.0,)))
    loss = task.loss_sum(torch.tensor([[0.0], [1.0]]), torch.tensor([100.0, 130.0]))
    assert loss.item() == pytest.approx(0 + 4)
    assert task.loss_sum(torch.zeros(0, 1), torch.zeros(0)).item() == 0


def test_labels_without_samples_are_left_out_of_the_means_and_said() -> None:
    torch.manual_seed(0)
    targets = (torch.rand(N, 4) < 0.3).float()
    targets[:, 3] = 0
    logits = targets + torch.randn(N, 4)
    result = evaluated(fitted("multi_label", info(TensorSpec((4,)))), logits, targets)
    scores, true = logits.sigmoid().numpy()[:, :3], targets.numpy()[:, :3]
    assert result.metrics["map"] == pytest.approx(reference.average_precision_score(true, scores), rel=1e-5)
    assert result.metrics["roc_auc"] == pytest.approx(reference.roc_auc_score(true, scores), rel=1e-5)
    f1 = reference.f1_score(targets.numpy(), logits.numpy() > 0, average=None, zero_division=np.nan)
    assert result.metrics["macro_f1"] == pytest.approx(np.nanmean(f1), rel=1e-5)
    assert "1 of 4 labels" in result.detail["notes"][0]


def test_ratings_and_clicks() -> None:
    ids = (TensorSpec((), "int64", 9), TensorSpec((), "int64", 9))
    torch.manual_seed(0)
    logits, clicked = torch.randn(N, 1), (torch.rand(N) < 0.5).float()
    clicks = fitted("recommendation", info(TensorSpec(count=2), ids))
    result = evaluated(clicks, logits, clicked)
    probabilities = logits.sigmoid().flatten().numpy()
    assert result.metrics["roc_auc"] == pytest.approx(reference.roc_auc_score(clicked, probabilities), rel=1e-5)
    assert result.metrics["log_loss"] == pytest.approx(reference.log_loss(clicked, probabilities), rel=1e-5)
    assert clicks.report_sections(result)[0].charts[0].title == "Calibration"
    ratings = fitted("recommendation", info(TensorSpec(), ids, target_mean=(3.0,), target_std=(1.0,)))
    assert evaluated(ratings, logits, logits.flatten() + 3.5).metrics["rmse"] == pytest.approx(0.5, rel=1e-5)


def test_clicks_of_which_a_model_is_certain_are_judged_by_its_logits() -> None:
    ids = (TensorSpec((), "int64", 9), TensorSpec((), "int64", 9))
    logits, clicked = torch.tensor([[20.0], [30.0], [-25.0], [60.0]]), torch.tensor([0.0, 1.0, 1.0, 1.0])
    clicks = fitted("recommendation", info(TensorSpec(count=2), ids))
    result = evaluated(clicks, logits, clicked)
    assert result.metrics["log_loss"] == pytest.approx(float(clicks.loss_sum(logits, clicked)) / 4, rel=1e-6)
    assert result.metrics["roc_auc"] == pytest.approx(reference.roc_auc_score(clicked, logits.flatten()), rel=1e-6)


def test_ranks_count_ties_and_what_is_no_number_against_the_model() -> None:
    scores = torch.tensor([[9.0, 1, 2, 3], [0, 1, 1, 0], [0, 5, torch.nan, 1], [0, torch.nan, 2, 1], [0, 1, 2, 3]])
    targets = torch.tensor([[NO_TARGET, 0, 1, 0.0], [0, 1, 0, 0], [0, 1, 0, 0], [0, 1, 0, 0], [NO_TARGET, 0, 0, 0]])
    assert ranks_of(scores, targets).tolist() == [2, 2, 2, math.inf, math.inf]


def test_a_ranking_is_judged_as_torchmetrics_does() -> None:
    given = tuple(TensorSpec((60,), "int64", count) for count in (N, 60))
    task = fitted("recommendation", info(TensorSpec((60,), count=2), given))
    torch.manual_seed(0)
    scores, targets = torch.randn(N, 60, 1), torch.nn.functional.one_hot(torch.randint(1, 60, (N,)), 60).float()
    targets[:, 0] = NO_TARGET
    result = evaluated(task, scores, targets)
    rows = [(row[1:, 0], target[1:].bool()) for row, target in zip(scores, targets, strict=True)]
    assert result.metrics["ndcg10"] == pytest.approx(
        np.mean([float(retrieval_normalized_dcg(*row, 10)) for row in rows])
    )
    assert result.metrics["hit_rate10"] == pytest.approx(np.mean([float(retrieval_hit_rate(*row, 10)) for row in rows]))
    by_hand = sum(-row.log_softmax(0)[target].sum() for row, target in rows)
    assert torch.isclose(task.loss_sum(scores, targets), by_hand)
    assert task.report_sections(result)[0].charts[0].title == "Hit rate"
    assert task.wrong_outputs(scores, N) == task.wrong_outputs(scores[..., 0], N) == ""
    assert "must return a score for each id" in task.wrong_outputs(scores[:, 0], N)


def test_a_ranking_takes_a_loss_and_metrics_of_ones_own() -> None:
    ids = tuple(TensorSpec((5,), "int64", count) for count in (N, 5))
    task = fitted("recommendation", info(TensorSpec((5,), count=2), ids))
    scores, targets = torch.randn(N, 5, 1), torch.nn.functional.one_hot(torch.randint(0, 5, (N,)), 5).float()
    own = TailoredTask(task, torch.nn.BCEWithLogitsLoss(), {"mse": MeanSquaredError()}, Metric("loss", "min"))
    assert own.wrong_loss(scores, targets) == ""
    assert torch.isclose(own.loss_sum(scores, targets), binary_cross_entropy_with_logits(scores[..., 0], targets) * N)
    result = evaluated(own, scores, targets)
    assert result.metrics["mse"] == pytest.approx(float((scores[..., 0] - targets).square().mean()))
    plain = TailoredTask(task, None, {}, Metric("loss", "min"))
    assert evaluated(plain, scores, targets).metrics["loss"] == pytest.approx(float(task.loss_sum(scores, targets)) / N)


@pytest.mark.parametrize("name", ["regression", "multi_label"])
def test_nothing_to_evaluate_gives_undefined_metrics(name: str) -> None:
    task = fitted(name, info(TensorSpec((3,))))
    result = evaluated(task, torch.zeros(0, 3), torch.zeros(0, 3))
    assert set(result.metrics.values()) == {None}
    task.report_sections(result)


@pytest.mark.parametrize(
    ("name", "targets", "message"),
    [
        ("classification", TensorSpec(), "--task classification needs one whole number, the class"),
        (
            "classification",
            TensorSpec((9,), "int64", ragged=True),
            r"--task language-modelling learns these \(a class for each position\)",
        ),
        ("classification", TensorSpec((3,)), "--task classification needs one whole number"),
        ("image_classification", TensorSpec((1,), "int64"), "--task image-classification needs one whole number"),
        ("regression", TensorSpec((), "int64"), "--task regression needs numbers, float32"),
        ("regression", TensorSpec((2, 2)), "--task regression needs numbers, float32"),
        ("multi_label", TensorSpec(), "--task multi-label needs a 0 or 1 for each of at least 2 labels"),
        ("recommendation", TensorSpec(), "--task recommendation needs inputs of ids and one target"),
    ],
)
def test_targets_of_another_kind_are_refused(name: str, targets: TensorSpec, message: str) -> None:
    with pytest.raises(UserError, match=message):
        fitted(name, info(targets))


@pytest.mark.parametrize("kind", [torch.float32, torch.int64])
def test_pairs_from_python_that_were_taken_or_not_are_clicks(kind: torch.dtype) -> None:
    users, items, taken = torch.arange(12) % 4, torch.arange(12) % 5, torch.arange(12) % 2
    task = build_task("recommendation")

    def learnt(targets: torch.Tensor) -> Task:
        data = TensorDataset(users, items, targets)
        return task.fitted(from_datasets(data, data).info, TaskSettings())

    clicks = learnt(taken.to(kind))
    assert clicks.primary.name == "roc_auc" and clicks.outputs == 1
    outputs = torch.zeros(12, 1)
    assert float(clicks.loss_sum(outputs, taken.to(kind))) == pytest.approx(12 * math.log(2))
    metrics = clicks.metrics(torch.device("cpu"))
    metrics.update(outputs, taken.to(kind))
    assert metrics.compute().metrics["log_loss"] == pytest.approx(math.log(2))
    assert learnt(taken * 1.5).primary.name == "rmse"
