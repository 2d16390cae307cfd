from __future__ import annotations

import json
import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from torch import Tensor

from echelon.tasks.classification_metrics import ClassificationMetrics

CPU = torch.device("cpu")


def draw(n: int, classes: int, seed: int = 0, present: int | None = None) -> tuple[Tensor, Tensor]:
    """Draw logits that know something; each sample comes twice, with targets of its own, so that scores tie."""
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(0, present or classes, (n,), generator=generator)
    logits = torch.randn(n, classes, generator=generator)
    logits[torch.arange(n), targets] += 1.5
    logits[n // 2 :] = logits[: n - n // 2]
    return logits, targets


def evaluate(logits: Tensor, targets: Tensor, batch: int = 37, **options: Any) -> dict[str, Any]:
    evaluation = ClassificationMetrics([str(c) for c in range(logits.shape[1])], CPU, **options)
    for part in range(0, len(targets), batch):
        evaluation.update(logits[part : part + batch], targets[part : part + batch])
    computed = evaluation.compute()
    result = {"metrics": computed.metrics, **computed.detail}
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    return result


@pytest.mark.parametrize("classes", [2, 3, 10])
def test_equals_scikit_learn(classes: int) -> None:
    logits, targets = draw(500, classes)
    result = evaluate(logits, targets)
    truth, predicted, scores = targets.numpy(), logits.argmax(1).numpy(), logits.double().softmax(1).numpy()
    by_class = sk.precision_recall_fscore_support(truth, predicted)
    macro = sk.precision_recall_fscore_support(truth, predicted, average="macro")
    areas = [sk.roc_auc_score(truth == c, scores[:, c]) for c in range(classes)]
    expected = {
        "top1": sk.accuracy_score(truth, predicted),
        "top5": np.mean([t in np.argsort(-s, kind="stable")[:5] for t, s in zip(truth, logits.numpy(), strict=True)]),
        "macro_precision": macro[0],
        "macro_recall": macro[1],
        "macro_f1": macro[2],
        "roc_auc": np.mean(areas),
    }
    # torchmetrics divides the counts of a curve in float32.
    assert result["metrics"].pop("roc_auc") == pytest.approx(expected.pop("roc_auc"), abs=1e-7)
    assert result["metrics"] == pytest.approx(expected, abs=1e-9)
    assert result["confusion"] == sk.confusion_matrix(truth, predicted).tolist()
    for name, column in zip(("precision", "recall", "f1", "support"), by_class, strict=True):
        assert result["per_class"][name] == pytest.approx(column, abs=1e-9), name
    assert result["per_class"]["roc_auc"] == pytest.approx(areas, abs=1e-7)


def test_curves_are_scikit_learns_and_few_points() -> None:
    logits, targets = draw(3000, 3)
    result = evaluate(logits + 0.01 * torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)), targets)
    for c in range(3):
        drawn = result["roc"][str(c)]
        assert 50 < len(drawn["fpr"]) == len(drawn["tpr"]) <= 200
        assert (drawn["fpr"][0], drawn["tpr"][0], drawn["fpr"][-1], drawn["tpr"][-1]) == (0, 0, 1, 1)
        assert np.trapezoid(drawn["tpr"], drawn["fpr"]) == pytest.approx(result["per_class"]["roc_auc"][c], abs=0.002)
    macro = result["roc"]["macro"]
    assert len(macro["fpr"]) == 200 and np.trapezoid(macro["tpr"], macro["fpr"]) == pytest.approx(
        result["metrics"]["roc_auc"], abs=0.005
    )
    assert macro["tpr"] == sorted(macro["tpr"])


def test_the_macro_curve_is_the_mean_of_interpolated_ones() -> None:
    logits, targets = draw(400, 3)
    result = evaluate(logits, targets)
    scores = logits.double().softmax(1).numpy()
    grid = np.linspace(0, 1, 200)
    curves = [sk.roc_curve(targets.numpy() == c, scores[:, c], drop_intermediate=False)[:2] for c in range(3)]
    mean = np.mean([np.interp(grid, fpr, tpr) for fpr, tpr in curves], axis=0)
    assert result["roc"]["macro"]["tpr"][1:] == pytest.approx(list(mean[1:]), abs=2e-6)


@pytest.mark.parametrize("classes", [3, 200])
def test_binned_curves_are_close_and_said(classes: int) -> None:
    logits, targets = draw(2000, classes)
    exact, binned = evaluate(logits, targets), evaluate(logits, targets, exact_roc_limit=1000)
    assert any("ROC at 200 thresholds" in note for note in binned["notes"]) and not any(
        "ROC" in note for note in exact["notes"]
    )
    # A class has 10 samples of 200 classes: one sample on the other side of a threshold shows.
    assert binned["per_class"]["roc_auc"] == pytest.approx(exact["per_class"]["roc_auc"], abs=0.02)
    assert binned["metrics"]["roc_auc"] == pytest.approx(exact["metrics"]["roc_auc"], abs=0.002)
    assert {**binned["metrics"], "roc_auc": 0} == {**exact["metrics"], "roc_auc": 0}


def test_fewer_than_five_classes_and_absent_ones_are_said() -> None:
    logits, targets = draw(200, 4, present=2)
    logits[:, 3] = -100  # neither present nor predicted
    assert (logits.argmax(1) == 2).any(), "predicted, not present"
    result = evaluate(logits, targets)
    assert result["metrics"]["top5"] == 1 and "4 best of 4" in result["notes"][0]
    assert "2 of 4 classes have no samples" in result["notes"][1]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        macro = sk.precision_recall_fscore_support(targets, logits.argmax(1), average="macro")
    names = ("macro_precision", "macro_recall", "macro_f1")
    assert [result["metrics"][name] for name in names] == pytest.approx(macro[:3])
    assert result["per_class"]["recall"][2:] == [None, None] and result["per_class"]["precision"][2:] == [0.0, None]
    assert result["per_class"]["roc_auc"][2:] == [None, None] and set(result["roc"]) == {"macro", "0", "1"}


def test_no_samples_and_broken_outputs() -> None:
    empty = evaluate(torch.zeros(0, 6), torch.zeros(0, dtype=torch.int64))
    assert set(empty["metrics"].values()) == {None} and empty["roc"] == {}
    logits, targets = draw(20, 6)
    logits[3, 2] = float("nan")
    broken = evaluate(logits, targets)
    assert broken["metrics"]["roc_auc"] is None and "1 samples had an output that is not finite" in broken["notes"][0]


def test_one_class_alone_has_no_curve() -> None:
    result = evaluate(torch.randn(5, 6), torch.zeros(5, dtype=torch.int64))
    assert result["metrics"]["roc_auc"] is None and result["per_class"]["roc_auc"] == [None] * 6


def test_wrong_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match="do not fit 6 classes"):
        ClassificationMetrics("abcdef", CPU).update(torch.zeros(3, 5), torch.zeros(3, dtype=torch.int64))


def test_logits_that_look_like_probabilities_are_logits() -> None:
    """torchmetrics would take a batch of which all logits lie in 0..1 for probabilities, and others not."""
    logits, targets = draw(60, 3)
    logits[:30] = logits[:30].sigmoid()
    areas = [sk.roc_auc_score(targets.numpy() == c, logits.double().softmax(1).numpy()[:, c]) for c in range(3)]
    assert evaluate(logits, targets, batch=30)["per_class"]["roc_auc"] == pytest.approx(areas, abs=1e-7)


def test_sure_outputs_keep_their_order() -> None:
    """Float32 probabilities of these would all be 1."""
    logits = torch.tensor([[20.0, 0], [22, 0], [24, 0], [26, 0]])
    assert evaluate(logits, torch.tensor([1, 1, 0, 0]))["metrics"]["roc_auc"] == 1


def test_one_class_and_nothing_to_warn_of() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        only = evaluate(torch.randn(5, 1), torch.zeros(5, dtype=torch.int64))
        evaluate(torch.randn(5, 6), torch.zeros(5, dtype=torch.int64))
    assert only["metrics"]["top1"] == 1 and only["metrics"]["roc_auc"] is None and only["confusion"] == [[5]]


def test_imports_wait_until_they_are_needed() -> None:
    code = (
        "import sys, torch; from echelon.optim import build; from echelon.tasks import image_classification;"
        "print([m for m in ('torchmetrics', 'sklearn', 'scipy', 'sympy', 'timm', 'torchvision') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"
