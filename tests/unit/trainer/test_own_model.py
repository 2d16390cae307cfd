"""A model from Python is tried out before anything starts: one line for what the first step could not use."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

from echelon.config import build
from echelon.core.errors import UserError
from echelon.core.task import Metric
from echelon.data import example_samples, from_datasets
from echelon.tasks.base import EvaluationResult, Task, TaskSettings
from echelon.tasks.own_loss import LossFunction, takes_whole_outputs
from echelon.tasks.registry import build_task
from echelon.tasks.regression import Regression
from echelon.tasks.tailored import TailoredTask
from echelon.trainer.own_trial import check_own_model, check_single_samples, make_whole
from echelon.trainer.parts import build_whole
from echelon.trainer.work import Work
from tests.ranks.layouts import make_world

X = torch.randn(12, 8)
Y = torch.arange(12) % 3


class Raises(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("mine")


class TupleInTraining(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, ...]:
        out = super().forward(x)
        return (out, out) if self.training else out


class Counts(nn.Module):
    """Has statistics and noise that a trial must not move."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.head = nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.drop(self.norm(x)))


class WithAuxiliary(nn.Module):
    """As GoogLeNet: a second head that it has in training alone."""

    Output = namedtuple("Output", ("logits", "aux"))

    def __init__(self) -> None:
        super().__init__()
        self.head, self.aux = nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor | Output:
        return self.Output(self.head(x), self.aux(x)) if self.training else self.head(x)


def both_heads(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    if isinstance(outputs, torch.Tensor):
        return F.cross_entropy(outputs, targets, reduction="none")
    return sum(F.cross_entropy(logits, targets, reduction="none") for logits in outputs)  # type: ignore[return-value]


def check(
    model: nn.Module,
    inputs: torch.Tensor,
    targets: torch.Tensor,
    at_hand: bool = True,
    loss: LossFunction | None = None,
    own: Task | None = None,
) -> str:
    """Try a model out on data of one's own; returns the name of the task."""
    work = work_of(inputs, targets, at_hand, loss, own)
    check_own_model(model, work)
    return work.info.task


def work_of(
    inputs: torch.Tensor,
    targets: torch.Tensor,
    at_hand: bool = True,
    loss: LossFunction | None = None,
    own: Task | None = None,
) -> Work:
    data = TensorDataset(inputs, targets)
    source = from_datasets(data, data)
    task = (own or build_task(source.info.task)).fitted(source.info, TaskSettings())
    if loss is not None:
        task = TailoredTask(task, loss, {}, task.primary)
    example, example_targets = example_samples(source) if at_hand else (None, None)
    return Work(source.info, task, example=example, example_targets=example_targets)


@pytest.mark.parametrize(
    ("model", "inputs", "targets", "words"),
    [
        (nn.Linear(8, 2), X, Y, r"shape \(batch, 3\), one per class; for a batch of 2 it returned \[2, 2\]$"),
        (nn.Linear(8, 7), X, Y, r"it returned \[2, 7\]$"),
        (nn.Linear(8, 3), X, Y + 1, "labels are 1 to 3, and classes are numbered from 0: give targets - 1"),
        (nn.Linear(8, 3), X.double(), Y, "inputs are float64 and the parameters of Linear are float32: give float32"),
        (nn.Linear(8, 2), X, X.sum(1), "must return 1 numbers for each sample"),
    ],
)
def test_what_cannot_be_used_is_refused(
    model: nn.Module, inputs: torch.Tensor, targets: torch.Tensor, words: str
) -> None:
    with pytest.raises(UserError, match=words):
        check(model, inputs, targets)


def test_numbers_with_fractions_are_learnt_by_regression_and_whole_ones_are_classes() -> None:
    assert check(nn.Linear(8, 1), X, X.sum(1)) == "regression"
    assert check(nn.Linear(8, 2), X, X[:, :2]) == "regression"
    assert check(nn.Linear(8, 3), X, Y) == "image_classification"


@pytest.mark.parametrize(("model", "loss", "count"), [
    (nn.Sequential(nn.Linear(8, 3), nn.Softmax(-1)), None, 1),
    (nn.Sequential(nn.Linear(8, 3), nn.LogSoftmax(-1)), None, 0),
    (nn.Sequential(nn.Linear(8, 3), nn.Sigmoid()), None, 0),
    (nn.Sequential(nn.Linear(8, 3), nn.Softmax(-1)), F.cross_entropy, 0),
])  # fmt: skip
def test_a_model_that_ends_in_a_softmax_is_told_that_the_loss_takes_logits(
    model: nn.Module, loss: LossFunction | None, count: int
) -> None:
    work = work_of(X, Y, loss=loss)
    check_own_model(model, work)
    assert len(work.oddities) == count == sum("sum to 1" in note for _, note in work.notes)


def test_what_forward_raises_is_refused_with_its_place_where_data_are_at_hand() -> None:
    with pytest.raises(
        UserError, match=r"model Raises cannot be called .*RuntimeError: mine \(.*test_own_model.py:\d+"
    ):
        check(Raises(8, 3), X, Y)
    check(Raises(8, 3), X, Y, at_hand=False)  # of zeros it says nothing


@pytest.mark.parametrize(
    ("model", "inputs", "words"),
    [
        (
            nn.Linear(7, 3),
            X,
            r"cannot be called with samples of data TensorDataset, \(8,\) of float32: RuntimeError: ",
        ),
        (nn.Linear(8, 3), X.long(), "of int64: RuntimeError"),
        (nn.Linear(8, 3).double(), X, "RuntimeError: mat1 and mat2 must have the same dtype"),
        (TupleInTraining(8, 3), X, "it returned tuple in training mode"),
    ],
)
def test_what_the_first_step_could_not_do_is_refused(model: nn.Module, inputs: torch.Tensor, words: str) -> None:
    with pytest.raises(UserError, match=words):
        check(model, inputs, Y)


def test_a_batch_of_one_sample_is_refused_where_normalisation_needs_several() -> None:
    data = TensorDataset(X, Y)
    source = from_datasets(data, data)
    task = build_task(source.info.task).fitted(source.info, TaskSettings())
    with pytest.raises(UserError, match=r"model Counts normalises over .* a worker has one alone in the last batch"):
        check_single_samples(Counts(), Work(source.info, task, least_samples=1, usual_samples=4))
    with pytest.raises(UserError, match=r"one alone in every batch: use a larger --batch-size, fewer workers, or"):
        check_single_samples(Counts(), Work(source.info, task, least_samples=1, usual_samples=1))
    check_single_samples(Counts(), Work(source.info, task, least_samples=2))
    for model, needs in ((Counts(), [True]), (nn.Linear(8, 3), [])):
        work = Work(source.info, task, least_samples=2, balances=True)
        check_single_samples(model, work)
        assert work.needs_several == needs, "parts that follow speed leave it several"
    check_single_samples(nn.Linear(8, 3), Work(source.info, task, least_samples=1))


def test_a_trial_moves_nothing() -> None:
    model = Counts()
    before, generator = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    check(model, X, Y)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(generator, torch.get_rng_state()) and model.training


def test_a_loss_of_ones_own_sees_all_that_a_model_returns_and_is_tried_too() -> None:
    assert check(WithAuxiliary(), X, Y, loss=both_heads) == "image_classification"
    with pytest.raises(UserError, match=r"cannot take what the model returned, Output of \(2, 3\) .*outputs.logits"):
        check(WithAuxiliary(), X, Y, loss=lambda outputs, targets: F.cross_entropy(outputs, targets))
    assert takes_whole_outputs(both_heads) and takes_whole_outputs(partial(both_heads))
    assert not takes_whole_outputs(nn.CrossEntropyLoss()) and not takes_whole_outputs(F.cross_entropy)


class Cut(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).detach()


def test_a_loss_without_a_gradient_and_a_model_without_values_are_refused() -> None:
    with pytest.raises(UserError, match=r"model Cut: the loss has no gradient: .* cut off, by detach\(\)"):
        check(Cut(8, 3), X, Y)
    with torch.device("meta"):
        empty = nn.Sequential(nn.Linear(8, 3))
    with pytest.raises(UserError, match=r"0\.weight is on the meta device and has no values"):
        make_whole(empty, work_of(X, Y))


def test_lazy_layers_get_their_sizes_from_two_samples() -> None:
    made = []
    for _ in range(2):
        torch.manual_seed(3)
        made.append(nn.Sequential(nn.LazyLinear(5), nn.Dropout(), nn.LazyLinear(3)))
        make_whole(made[-1], work_of(X, Y))
        assert torch.initial_seed() == 3 and made[-1].training
    first, second = (model.state_dict() for model in made)
    assert [tuple(each.shape) for each in first.values()] == [(5, 8), (5,), (3, 5), (3,)]
    assert all(torch.equal(first[name], second[name]) for name in first)
    with pytest.raises(UserError, match="model Sequential cannot be called with samples of data TensorDataset"):
        make_whole(nn.Sequential(nn.LazyConv2d(3, 3)), work_of(X, Y))


class Right:
    """Counts what is right, as a metric of the user's own."""

    def __init__(self) -> None:
        self.right = self.count = 0

    def update(self, outputs: torch.Tensor, targets: torch.Tensor) -> None:
        self.right, self.count = self.right + int((outputs.argmax(1) == targets).sum()), self.count + len(targets)

    def compute(self, group: Any = None) -> EvaluationResult:
        return EvaluationResult({"right": self.right / self.count})


class Mine(Task):
    name, primary, outputs = "mine", Metric("right", "max", "Right"), 3

    def loss_sum(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs, targets, reduction="sum")

    def metrics(self, device: torch.device) -> Any:
        return Right()


class EachLoss(Mine):
    def loss_sum(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(outputs, targets, reduction="none")


class NoMetrics(Mine):
    def metrics(self, device: torch.device) -> Any:
        return None


class OtherPrimary(Mine):
    primary = Metric("accuracy", "max", "Accuracy")


class NeedsMany(Mine):
    def loss_sum(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        if len(targets) < 5:
            raise ValueError("too few to find a hard one")
        return super().loss_sum(outputs, targets)


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (EachLoss(), r"task mine: loss_sum must return one number .* returned a tensor of shape \(2,\)"),
        (NoMetrics(), "task mine: metrics must return an object with update and compute, and returned NoneType"),
        (OtherPrimary(), "task mine: its primary metric is 'accuracy', and its metrics give right"),
    ],
)
def test_a_task_of_which_nothing_can_be_made_is_refused(task: Task, words: str) -> None:
    with pytest.raises(UserError, match=words):
        check_own_model(nn.Linear(8, 3), replace(work_of(X, Y), task=task))


@pytest.mark.parametrize("task", [Mine(), NeedsMany()])
def test_a_task_that_may_do_is_taken(task: Task) -> None:
    assert task.is_own
    check_own_model(nn.Linear(8, 3), replace(work_of(X, Y), task=task))


def test_outputs_that_metrics_cannot_take_are_refused_before_the_first_evaluation() -> None:
    torchmetrics = pytest.importorskip("torchmetrics")
    work = work_of(X, Y)
    squared = TailoredTask(work.task, None, {"mse": torchmetrics.MeanSquaredError()}, work.task.primary)
    with pytest.raises(UserError, match=r"its metrics cannot take outputs \(2, 3\), and targets \(2,\): RuntimeError"):
        check_own_model(nn.Linear(8, 3), replace(work, task=squared))
    with pytest.raises(UserError, match=r"its metrics cannot take outputs \(2, 7\), .*task=supervised only metrics"):
        check(nn.Linear(8, 7), X, Y, loss=nn.CrossEntropyLoss())
    taken = TailoredTask(work.task, None, {"f1": torchmetrics.F1Score("multiclass", num_classes=3)}, work.task.primary)
    check_own_model(nn.Linear(8, 3), replace(work, task=taken))


class Reduced(Regression):
    """Gives what a function makes of errors `(B, 1)`; its units are pairs, of which a sample has one or two."""

    unit = "pair"

    def __init__(self, reduce: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.reduce = reduce

    def loss_sum(self, outputs: Any, targets: Any) -> torch.Tensor:
        return self.reduce((outputs - targets).square())

    def units(self, targets: Any) -> int:
        return int((1 + (targets > 1)).sum())


def _of_pairs(errors: torch.Tensor) -> torch.Tensor:
    return (errors - errors.mean()).square().mean()  # of one sample 0, as of contrastive losses


def test_a_task_that_returns_the_mean_of_a_batch_is_refused() -> None:
    targets = torch.tensor([[0.5], [3.0]] * 6)
    for function in (torch.sum, torch.max, _of_pairs, lambda errors: errors.sum() * torch.randn(()), torch.linalg.det):
        assert check(nn.Linear(8, 1), X, targets, own=Reduced(function)) == "regression"
    with pytest.raises(UserError, match=r"task regression: its loss_sum returns the mean over a batch, .*'sum'"):
        check(nn.Linear(8, 1), X, torch.full((12, 1), 0.5), own=Reduced(torch.mean))

    def by_unit(errors: torch.Tensor) -> torch.Tensor:
        weights = torch.tensor([[1.0], [2.0]])[: len(errors)] if len(errors) == 2 else torch.ones(1, 1)
        return (weights * errors).sum() / weights.sum()

    with pytest.raises(UserError, match="task regression: its loss_sum returns the mean"):
        check(nn.Linear(8, 1), X, targets, own=Reduced(by_unit))


def test_a_module_that_is_compiled_already_is_refused() -> None:
    config = build(None, {}).config
    work = replace(work_of(X, Y), user_model=torch.compile(nn.Linear(8, 3)))
    with pytest.raises(UserError, match=r"wrapped by torch\.compile already.*give the module itself, and compile=True"):
        build_whole(config, work, make_world(config, None))
