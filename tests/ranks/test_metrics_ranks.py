from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassAveragePrecision

from echelon.config import build
from echelon.core.figure import ReportSection
from echelon.data import Batch
from echelon.tasks.base import EvaluationResult
from echelon.tasks.classification_metrics import ClassificationMetrics
from echelon.tasks.gathering import RowMessages
from echelon.tasks.image_classification import ImageClassification
from echelon.tasks.own_metrics import OwnMetrics
from echelon.tasks.regression import RegressionMetrics, Units
from echelon.tasks.worst_samples import Pixels, WorstSamples
from echelon.trainer.evaluate import batches_of_all
from tests.ranks.layouts import make_world
from tests.ranks.spawn import Rank, run_ranks

SAMPLES, CLASSES = 101, 6
CPU = torch.device("cpu")
LIMITS = (10**6, 300, 50)  # exact ROC; binned at the end; binned while counting


def evaluate(
    parts: tuple[int, ...], index: int, group: dist.ProcessGroup | None, limit: int, streams: bool = False
) -> EvaluationResult:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(SAMPLES, CLASSES, generator=generator)
    targets = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
    mine = slice(sum(parts[:index]), sum(parts[: index + 1]))
    evaluation = ClassificationMetrics("abcdef", torch.device("cpu"), exact_roc_limit=limit)
    if group is not None and streams:
        evaluation.stream(RowMessages(group, 10, -(-max(parts) // 10)), SAMPLES)
    for part in zip(logits[mine].split(7), targets[mine].split(7), strict=True):
        evaluation.update(*part)
    evaluation.flush()
    return evaluation.compute(group)


def on_rank(rank: Rank, parts: tuple[int, ...]) -> list[EvaluationResult]:
    return [evaluate(parts, rank.index, dist.group.WORLD, limit, s) for limit in LIMITS for s in (False, True)]


@pytest.mark.parametrize("parts", [pytest.param((51, 50), marks=pytest.mark.slow), (100, 0, 1)], ids=str)
def test_each_sample_counts_once_however_the_set_is_cut(parts: tuple[int, ...]) -> None:
    expected = [evaluate((SAMPLES,), 0, None, limit) for limit in LIMITS for _ in range(2)]
    assert all(result == expected for result in run_ranks(on_rank, len(parts), parts))


def regression_of(
    parts: tuple[int, ...], index: int, group: dist.ProcessGroup | None, streams: bool
) -> EvaluationResult:
    """Evaluate float64 targets of about 1e9, a quarter beside what was predicted."""
    targets = 1e9 + torch.arange(SAMPLES, dtype=torch.float64)
    mine = slice(sum(parts[:index]), sum(parts[: index + 1]))
    evaluation = RegressionMetrics(["y"], Units(), CPU)
    if group is not None and streams:
        evaluation.stream(RowMessages(group, 10, -(-max(parts) // 10)), SAMPLES)
    for part in targets[mine].split(7):
        evaluation.update(part + 0.25, part)
    evaluation.flush()
    return evaluation.compute(group)


def regression_on_rank(rank: Rank, parts: tuple[int, ...]) -> list[EvaluationResult]:
    return [regression_of(parts, rank.index, dist.group.WORLD, streams) for streams in (False, True)]


def test_large_targets_are_compared_in_float64_on_all_ranks() -> None:
    parts = (100, 0, 1)
    expected = [regression_of((SAMPLES,), 0, None, streams) for streams in (False, True)]
    assert expected[0].metrics["rmse"] == 0.25
    assert all(result == expected for result in run_ranks(regression_on_rank, len(parts), parts))


def worst(parts: tuple[int, ...], index: int, group: dist.ProcessGroup | None) -> ReportSection | None:
    """Choose 5 of the samples; many losses are equal, and the images differ."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(0, 3, (SAMPLES, CLASSES), generator=generator).float()
    targets = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
    images = torch.rand(SAMPLES, 1, 8, 8, generator=generator)
    losses = partial(torch.nn.functional.cross_entropy, reduction="none")
    chosen, first = WorstSamples(5, "abcdef", Pixels((1, 8, 8), (), ()), losses), sum(parts[:index])
    for start in range(0, parts[index], 7):
        rows = slice(first + start, first + min(start + 7, parts[index]))
        chosen.update(images[rows], logits[rows], targets[rows], rows.start, True)
    return chosen.section(group).result()


def worst_on_rank(rank: Rank, parts: tuple[int, ...]) -> ReportSection | None:
    return worst(parts, rank.index, dist.group.WORLD)


@pytest.mark.parametrize("parts", [(51, 50), (100, 0, 1)], ids=str)
def test_the_worst_samples_are_the_same_however_the_set_is_cut(parts: tuple[int, ...]) -> None:
    expected = worst((SAMPLES,), 0, None)
    assert expected is not None and len(expected.pictures) == 5
    shown, *others = run_ranks(worst_on_rank, len(parts), parts)
    assert shown == expected and others == [None] * len(others)  # the first rank alone shows them


def own_metrics(parts: tuple[int, ...], index: int, group: dist.ProcessGroup | None) -> dict[str, float | None]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(SAMPLES, CLASSES, generator=generator)
    targets = torch.randint(0, CLASSES, (SAMPLES,), generator=generator)
    own = {
        "rows": MulticlassAveragePrecision(CLASSES),  # states (N, C) and (N,) of whole numbers
        "by_hand": MulticlassAUROC(CLASSES, sync_on_compute=False),
        "sums": MulticlassAccuracy(CLASSES),
    }
    metrics = OwnMetrics(ImageClassification(), ClassificationMetrics("abcdef", CPU), own, CPU)
    first = sum(parts[:index])
    for rows in torch.arange(first, first + parts[index]).split(7):
        if len(rows):
            metrics.update(logits[rows], targets[rows])
    return metrics.compute(group).metrics


def own_on_rank(rank: Rank, parts: tuple[int, ...]) -> dict[str, float | None]:
    return own_metrics(parts, rank.index, dist.group.WORLD)


@pytest.mark.parametrize("parts", [(SAMPLES, 0), (0, SAMPLES)], ids=str)
def test_own_metrics_that_keep_rows_are_the_same_where_a_rank_has_none(parts: tuple[int, ...]) -> None:
    expected = own_metrics((SAMPLES,), 0, None)
    for metrics in run_ranks(own_on_rank, 2, parts):
        assert metrics == pytest.approx(expected)


class Uneven:
    """An evaluation loader whose ranks have 3 and 1 batches of token ids, the last ones of rank 0 of nothing."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def example(self) -> torch.Tensor:
        return torch.zeros(1, 5, dtype=torch.int64)

    def __iter__(self) -> Iterator[Batch]:
        for i in range(self.count):
            size = 2 if i < 2 else 0
            yield Batch(torch.ones(size, 5, dtype=torch.int64), torch.ones(size, dtype=torch.int64), size, i)


def sharded_batches(rank: Rank) -> list[tuple[tuple[int, ...], bool]]:
    world = make_world(build(None, {"strategy.parallel": "fsdp=2"}).config, rank)
    found = []
    for inputs, targets in batches_of_all(Uneven(3 - 2 * rank.index), world):  # type: ignore[arg-type]
        assert inputs.dtype == torch.int64
        dist.all_reduce(torch.zeros(1))  # as a sharded model's forward does: all ranks or none
        found.append((tuple(inputs.shape), targets is not None))
    return found


def test_sharded_ranks_with_fewer_batches_go_along_with_a_sample() -> None:
    first, second = run_ranks(sharded_batches, 2)
    assert first == [((2, 5), True), ((2, 5), True), ((1, 5), False)]
    assert second == [((2, 5), True), ((1, 5), False), ((1, 5), False)]
