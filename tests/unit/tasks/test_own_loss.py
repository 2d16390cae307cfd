"""A loss of the user's own: whatever it returns becomes the sum over samples, or is refused on the first batch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from echelon.core.errors import UserError
from echelon.data import from_datasets
from echelon.data.base import DataInfo
from echelon.tasks.base import TaskSettings
from echelon.tasks.image_classification import ImageClassification
from echelon.tasks.nest import TensorSpec
from echelon.tasks.own_loss import OwnLoss, read_loss
from echelon.tasks.registry import TaskChoice, build_task
from echelon.tasks.supervised import Supervised
from echelon.tasks.tailored import TailoredTask

LOGITS = torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
TARGETS = torch.tensor([0, 1, 2, 0, 1, 2])
SUM = float(F.cross_entropy(LOGITS, TARGETS, reduction="sum"))


def each(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


def scaled(outputs: Tensor, targets: Tensor, scale: float = 1.0) -> Tensor:
    return scale * each(outputs, targets).sum()


def pairs(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss against the other samples of the batch."""
    return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)), reduction="none")


class Weighted(Supervised):
    """Each sample has a number of units, as a text has tokens."""

    unit = "pair"

    def units(self, targets: dict[str, Tensor]) -> int:
        return int(targets["count"].sum())


class Trained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)


@pytest.mark.parametrize(
    "loss",
    [
        each,
        scaled,
        nn.CrossEntropyLoss(),
        nn.CrossEntropyLoss(reduction="sum"),
        nn.CrossEntropyLoss(reduction="none"),
        lambda outputs, targets: each(outputs, targets)[:, None],
    ],
)
def test_what_a_loss_returns_becomes_the_sum_over_samples(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    own = OwnLoss(loss, ImageClassification())
    assert float(own(LOGITS[:1], TARGETS[:1])) == pytest.approx(float(each(LOGITS[:1], TARGETS[:1])))
    assert float(own(LOGITS, TARGETS)) == pytest.approx(SUM)
    in_parts = [float(own(LOGITS[part], TARGETS[part])) for part in (slice(0, 2), slice(2, 3), slice(3, 6))]
    assert sum(in_parts) == pytest.approx(SUM)


def test_what_is_found_out_changes_no_random_numbers() -> None:
    own = OwnLoss(lambda outputs, targets: each(outputs + 0 * torch.randn(1), targets), ImageClassification())
    torch.manual_seed(3)
    own(LOGITS, TARGETS)
    after = torch.get_rng_state()
    torch.manual_seed(3)
    torch.randn(1)
    assert torch.equal(after, torch.get_rng_state())


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_units_that_are_no_samples(reduction: str) -> None:
    task, outputs = Weighted(), torch.tensor([[1.0], [2.0], [4.0]])
    targets = {"value": torch.zeros(3), "count": torch.tensor([1.0, 2.0, 3.0])}
    assert task.units(targets) == 6

    def squares(outputs: Tensor, targets: dict[str, Tensor]) -> Tensor:
        values = targets["count"] * outputs.squeeze(-1).square()
        return {"none": values, "sum": values.sum(), "mean": values.sum() / targets["count"].sum()}[reduction]

    assert float(OwnLoss(squares, task)(outputs, targets)) == pytest.approx(57.0)


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 9.0])), "it is no sum and no mean over samples"),
        (pairs, "it is no sum and no mean over samples"),
        (
            lambda outputs, targets: outputs,
            r"\[6, 3\] for 6 samples, of outputs .*: return one number",
        ),
        (lambda outputs, targets: 1.0, "it returned a float: return a tensor"),
    ],
)
def test_what_layouts_would_change_is_refused(loss: Callable[[Tensor, Tensor], Tensor], reason: str) -> None:
    with pytest.raises(UserError, match=f"^--loss.*{reason}"):
        OwnLoss(loss, ImageClassification())(LOGITS, TARGETS)


@pytest.mark.parametrize(
    "loss",
    [
        nn.CrossEntropyLoss(weight=torch.tensor([1.0, 1.2, 1.4])),
        lambda outputs, targets: outputs.std(),
        lambda outputs, targets: each(outputs, targets).square().mean().sqrt(),
    ],
)
def test_a_large_batch_tells_a_mean_from_what_is_nearly_one(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
    outputs = torch.randn(1000, 3, generator=torch.Generator().manual_seed(0))
    with pytest.raises(UserError, match="it is no sum and no mean over samples"):
        OwnLoss(loss, ImageClassification())(outputs, torch.arange(1000) % 3)


def test_samples_of_one_class_do_not_end_the_looking() -> None:
    """The model is tried on a few samples before the first step: those of one class tell no weighted mean."""
    own = OwnLoss(lambda o, y: F.cross_entropy(o, y, weight=torch.tensor([1.0, 9.0])), ImageClassification())
    own(torch.tensor([[1.0, 2.0], [0.5, 0.1]]), torch.tensor([1, 1]))
    with pytest.raises(UserError, match="no sum and no mean"):
        own(torch.randn(8, 2, generator=torch.Generator().manual_seed(0)), torch.arange(8) % 2)


@pytest.mark.parametrize("name", ["segmentation", "translation", "text-classification", "masked-language-modelling"])
def test_samples_are_read_as_the_task_reads_them(name: str) -> None:
    task = build_task(name)
    assert TailoredTask(task, None, {}, task.primary).encoding is task.encoding


def test_a_loss_with_parameters_is_refused() -> None:
    with pytest.raises(UserError, match="Trained has parameters of its own, which nothing would train"):
        OwnLoss(Trained(), ImageClassification())


@pytest.mark.parametrize(
    "text", ["CrossEntropyLoss(reduction=sum)", f"{__name__}:each", f"{__name__}:scaled(scale=1.0)"]
)
def test_losses_are_named(text: str) -> None:
    loss = read_loss(text)
    assert loss is not None and float(loss(LOGITS, TARGETS).sum()) == pytest.approx(SUM)
    assert read_loss("") is None


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("CrossEntropyLos", r"unknown --loss 'CrossEntropyLos': did you mean CrossEntropyLoss\?"),
        (f"{__name__}:eachh", r"did you mean each\?"),
        ("MSELoss+L1Loss", "name one loss"),
        ("MSELoss(bta=1)", "unexpected keyword argument 'bta'"),
        (f"{__name__}:LOGITS", "it is a Tensor, not a function of outputs and targets"),
        ("object:Focal", "it was an object given from Python"),
    ],
)
def test_a_name_that_is_no_loss_is_refused(text: str, reason: str) -> None:
    with pytest.raises(UserError, match=reason):
        read_loss(text)


def test_numbers_of_a_table_are_learnt_in_units_of_their_deviation_and_measured_in_their_own() -> None:
    info = DataInfo(
        "t.csv", (), 1, 1, 4, 4, (), several={"numbers": TensorSpec((2,))}, targets=TensorSpec(()), task="regression",
        target_mean=(100.0,), target_std=(10.0,), columns=("a", "b"),
    )  # fmt: skip
    outputs, targets = torch.tensor([[0.5], [-1.0]]), torch.tensor([106.0, 90.0])
    choice = TaskChoice("auto", TaskSettings(), "MSELoss", "MeanAbsoluteError")
    task = choice.fitted(info)
    assert task.name == "regression", "which a table's numbers are for, with a loss of one's own too"
    assert float(task.loss_sum(outputs, targets)) == pytest.approx(0.1**2, abs=1e-6)
    metrics = task.metrics(torch.device("cpu"))
    metrics.update(outputs, targets)
    found = metrics.compute().metrics
    assert found["mean_absolute_error"] == pytest.approx(0.5, abs=1e-5) and found["mae"] == pytest.approx(0.5, abs=1e-5)
    assert task.wrong_loss(outputs, targets) == ""


def test_a_loss_of_torch_takes_one_number_a_sample_as_targets_have_it() -> None:
    outputs, targets = torch.tensor([[1.0], [3.0], [5.0]]), torch.tensor([1.0, 2.0, 3.0])
    assert float(OwnLoss(nn.L1Loss(), Supervised())(outputs, targets)) == pytest.approx(3.0)


class PerWord:
    """The sum over the words of some sentences, padded with -1, and how many these are."""

    unit = "word"

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return ((outputs - targets).abs() * (targets >= 0)).sum()

    def units(self, targets: torch.Tensor) -> torch.Tensor:
        return (targets >= 0).sum()


def test_a_sum_is_over_units_of_its_own_where_the_loss_counts_them() -> None:
    data = TensorDataset(torch.randn(6, 3), torch.tensor([[1.0, 2, -1], [4, -1, -1]] * 3))
    fitted = build_task("supervised").fitted(from_datasets(data, data).info, TaskSettings())
    task = TailoredTask(fitted, PerWord(), {}, fitted.primary)
    targets = data.tensors[1]
    assert (task.unit, task.units(targets), task.facts().unit, task.facts().units_per_sample) == ("word", 9, "word", 0)
    outputs = torch.zeros(6, 3)
    assert float(task.loss_sum(outputs, targets)) == 21
    pair = TailoredTask(fitted, lambda o, t: (o.sum(), 9), {}, fitted.primary)  # type: ignore[arg-type, return-value]
    assert "return a tensor, the sum; where it is over units" in pair.wrong_loss(outputs, targets)
