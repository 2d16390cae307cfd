from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.utils.class_weight import compute_class_weight

from echelon.core.errors import UserError
from echelon.data.base import DataInfo
from echelon.tasks.base import TaskSettings
from echelon.tasks.image_classification import ImageClassification
from echelon.tasks.tailored import TailoredTask

COUNTS = (30, 10, 60)


def build_loss(
    counts: tuple[int, ...] = COUNTS, weights: str = "none", smoothing: float = 0.0
) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    names = tuple("abcdefgh"[: len(counts)])
    info = DataInfo("any", names, 1, 8, sum(counts), 10, counts)
    return ImageClassification().fitted(info, TaskSettings(smoothing, weights)).loss_sum


def draw(n: int = 12) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    return logits, torch.randint(0, 3, (n,), generator=generator)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weights", ["none", "balanced", "1,0.5,2"])
def test_the_sum_over_parts_is_the_sum_over_the_batch(weights: str, smoothing: float) -> None:
    loss = build_loss(weights=weights, smoothing=smoothing)
    logits, targets = draw()
    parts = sum(loss(logits[a:b], targets[a:b]) for a, b in ((0, 5), (5, 5), (5, 12)))
    torch.testing.assert_close(parts, loss(logits, targets))


def test_the_documented_formula() -> None:
    loss = build_loss(weights="1,0.5,2", smoothing=0.2)
    logits, targets = draw()
    smoothed = 0.8 * F.one_hot(targets, 3) + 0.2 / 3
    each = -(smoothed * logits.log_softmax(1)).sum(1)
    mean = (30 * 1 + 10 * 0.5 + 60 * 2) / 100  # weight of a training sample
    torch.testing.assert_close(loss(logits, targets), (torch.tensor([1, 0.5, 2])[targets] * each).sum() / mean)


def test_equal_weights_are_none_and_evaluations_sum_plain_cross_entropies() -> None:
    logits, targets = draw()
    plain = F.cross_entropy(logits, targets, reduction="sum")
    torch.testing.assert_close(build_loss(weights="2,2,2")(logits, targets), plain)
    info = DataInfo("any", tuple("abc"), 1, 8, 100, 10, COUNTS)
    task = ImageClassification().fitted(info, TaskSettings(0.1, "1,0.5,2"))
    torch.testing.assert_close(task.for_evaluation().loss_sum(logits, targets), plain)
    assert task.loss_sum(logits, targets) != plain
    tailored = TailoredTask(task, None, {}, task.primary)
    torch.testing.assert_close(tailored.for_evaluation().loss_sum(logits, targets), plain)
    torch.testing.assert_close(tailored.loss_sum(logits, targets), task.loss_sum(logits, targets))
    with pytest.raises(UserError, match="no class that has training samples has a weight"):
        build_loss((30, 0, 60), weights="0,1,0")


def test_balanced_weights_are_scikit_learns() -> None:
    loss = build_loss(weights="balanced")
    labels = np.repeat([0, 1, 2], COUNTS)
    expected = compute_class_weight("balanced", classes=np.arange(3), y=labels)
    one_by_one = [float(loss(torch.zeros(1, 3), torch.tensor([c]))) / np.log(3) for c in range(3)]
    assert one_by_one == pytest.approx(expected, rel=1e-6)


def test_a_class_without_samples_is_no_class() -> None:
    loss = build_loss((30, 0, 60), weights="balanced")
    weights = [float(loss(torch.zeros(1, 3), torch.tensor([c]))) / np.log(3) for c in range(3)]
    assert weights == pytest.approx([1.5, 0, 0.75], rel=1e-6)


def test_half_precision_logits_are_summed_in_single() -> None:
    loss = build_loss()
    assert loss(torch.zeros(1000, 3, dtype=torch.bfloat16), torch.zeros(1000, dtype=torch.int64)).dtype == torch.float32


def test_no_samples_cost_nothing_and_have_a_gradient() -> None:
    logits = torch.zeros(0, 3, requires_grad=True)
    for weights in ("none", "1,2,3"):
        total = build_loss(weights=weights)(logits, torch.zeros(0, dtype=torch.int64))
        total.backward()
        assert float(total.detach()) == 0


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1,2", "gives 2 weights, the data has 3 classes"),
        ("1,-2,3", "not negative"),
        ("1,nan,3", "finite"),
        ("0,0,0", "not all zero"),
        ("balancd", "write none, balanced"),
    ],
)
def test_refused(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        build_loss(weights=text)
