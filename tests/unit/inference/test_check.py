"""When an export counts as what was trained."""

import pytest
import torch

from echelon.core.task import Metric
from echelon.inference.check import Agreement, Scores

INFINITE, UNDEFINED = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("trained", "exported", "agrees"),
    [
        (INFINITE, INFINITE, True),
        (UNDEFINED, UNDEFINED, True),
        (1.0, 1.0009, True),
        (1.0, 1.002, False),
        (INFINITE, 1.0, False),
        (INFINITE, -INFINITE, False),
        (1.0, INFINITE, False),
        (UNDEFINED, 1.0, False),
    ],
)
def test_losses_and_metrics_that_are_not_finite_agree_where_they_are_the_same(
    trained: float, exported: float, agrees: bool
) -> None:
    of_loss = Agreement(9, 0.0, Scores(trained, 0.2), Scores(exported, 0.2), torch.ones(1), Metric("wer", "min"))
    of_metric = Agreement(9, 0.0, Scores(0.2, trained), Scores(0.2, exported), torch.ones(1), Metric("wer", "min"))
    assert (of_loss.objection == "") is (of_metric.objection == "") is agrees
