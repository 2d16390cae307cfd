"""Which evaluation is the best: by the primary metric, of equal ones by the loss, before and after a resume."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from echelon.core.task import BestResult, Metric
from echelon.tasks.base import EvaluationResult
from echelon.trainer.evaluate import EvaluationReport
from echelon.trainer.saving import Saver, best_state
from echelon.trainer.state import Cursor
from tests.unit.trainer.test_step_back import _saver

_TOP1, _RMSE = Metric("top1", "max"), Metric("rmse", "min")


class _Task:
    primary = _TOP1

    def report_sections(self, result: EvaluationResult) -> list[object]:
        """Return none."""
        return []


def _evaluated(saver: Saver, step: int, top1: float | None, loss: float) -> bool:
    report = EvaluationReport(loss, 10, 1.0, EvaluationResult({"top1": top1}))
    return saver.consider_best(Cursor(0, step, step), report, _Task())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("metric", "result", "before", "improves"),
    [
        (_TOP1, BestResult(0.9, 0.5), None, True),
        (_TOP1, BestResult(0.9, 0.5), BestResult(0.8, 0.1), True),
        (_TOP1, BestResult(0.8, 0.1), BestResult(0.9, 0.5), False),
        (_TOP1, BestResult(0.9, 0.4), BestResult(0.9, 0.5), True),
        (_TOP1, BestResult(0.9, 0.5), BestResult(0.9, 0.5), False),
        (_TOP1, BestResult(0.9, float("nan")), BestResult(0.9, 0.5), False),
        (_TOP1, BestResult(0.9, 0.4), BestResult(0.9), False),  # of an older checkpoint, whose loss is not known
        (_RMSE, BestResult(0.8, 0.5), BestResult(0.9, 0.1), True),
        (_RMSE, BestResult(0.9, 0.4), BestResult(0.9, 0.5), True),
    ],
)
def test_the_loss_decides_between_equal_metrics(
    metric: Metric, result: BestResult, before: BestResult | None, improves: bool
) -> None:
    assert result.improves(before, metric) is improves


def test_the_best_of_equal_evaluations_is_that_of_the_lowest_loss(tmp_path: Path) -> None:
    saver = _saver(tmp_path)
    kept = [_evaluated(saver, step, 0.9, loss) for step, loss in enumerate((0.5, 0.4, 0.45), 1)]
    saver.finish()
    assert kept == [True, True, False] and saver.best == BestResult(0.9, 0.4)
    assert best_state(tmp_path)["cursor"]["step"] == 2


def test_a_resume_knows_the_loss_of_the_best(tmp_path: Path) -> None:
    saver = _saver(tmp_path)
    assert _evaluated(saver, 1, 0.9, 0.4)
    saver.finish()
    resumed = _saver(tmp_path)
    resumed.restore()
    assert resumed.best == BestResult(0.9, 0.4)
    assert not _evaluated(resumed, 2, 0.9, 0.45) and _evaluated(resumed, 3, 0.9, 0.3)
    resumed.finish()


def test_without_a_metric_nothing_is_the_best(tmp_path: Path) -> None:
    saver = _saver(tmp_path)
    assert not _evaluated(saver, 1, None, 0.1) and saver.best is None
    assert not _evaluated(saver, 2, float("nan"), 0.1) and saver.best is None
    assert _evaluated(saver, 3, 0.5, float("nan")) and saver.best == BestResult(0.5)


def test_of_several_that_were_lost_none_is_the_best_but_the_one_on_the_disk(tmp_path: Path) -> None:
    saver = _saver(tmp_path)
    assert _evaluated(saver, 1, 0.5, 1.0)
    saver.settle()
    (first,) = (tmp_path / "checkpoints").glob("step-*")
    shutil.copytree(first, tmp_path / "first")
    assert _evaluated(saver, 2, 0.8, 1.0) and _evaluated(saver, 3, 0.9, 1.0)
    saver.finish()
    assert saver.kept_best() == BestResult(0.9, 1.0)
    for lost in (tmp_path / "checkpoints").glob("step-*"):
        shutil.rmtree(lost)
    (tmp_path / "first").rename(first)
    assert saver.kept_best() == BestResult(0.5, 1.0)
