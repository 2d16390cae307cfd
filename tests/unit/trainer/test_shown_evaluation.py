"""What reports show of the best evaluation is written at once, and again with what comes from other ranks later."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from echelon.core.figure import ReportSection
from echelon.core.task import Metric
from echelon.tasks.base import EvaluationResult, PendingSection
from echelon.trainer.evaluate import EvaluationReport
from echelon.trainer.saving import EVALUATION_FILE
from echelon.trainer.state import Cursor
from tests.unit.trainer.test_step_back import _saver


class _Work:
    """Pictures on their way."""

    arrived = waited = False

    def is_completed(self) -> bool:
        """Whether they are there."""
        return self.arrived

    def wait(self) -> None:
        """Wait for them."""
        self.waited = True


class _Task:
    primary = Metric("top1", "max")

    def report_sections(self, result: EvaluationResult) -> list[ReportSection]:
        """Return the task's own."""
        return [ReportSection("Classes")]


def _report(top1: float, work: _Work) -> EvaluationReport:
    pending = PendingSection(lambda: ReportSection("Pictures"), [work])  # type: ignore[list-item]
    return EvaluationReport(0.1, 10, 1.0, EvaluationResult({"top1": top1}), collect=lambda: pending)


def _shown(folder: Path) -> tuple[float, list[str]]:
    found: Mapping[str, list[Mapping[str, str]]] = json.loads((folder / EVALUATION_FILE).read_text())
    return found["metrics"]["top1"], [section["title"] for section in found["sections"]]  # type: ignore[call-overload]


def test_pictures_come_later_and_nothing_waits_for_them(tmp_path: Path) -> None:
    saver, work = _saver(tmp_path), _Work()
    assert saver.consider_best(Cursor(0, 1, 1), _report(0.5, work), _Task())  # type: ignore[arg-type]
    saver.is_due()
    assert _shown(tmp_path) == (0.5, ["Classes"]) and not work.waited
    work.arrived = True
    saver.is_due()
    assert _shown(tmp_path) == (0.5, ["Classes", "Pictures"])


def test_the_next_best_and_the_end_wait_for_them(tmp_path: Path) -> None:
    saver, first, second = _saver(tmp_path), _Work(), _Work()
    assert saver.consider_best(Cursor(0, 1, 1), _report(0.5, first), _Task())  # type: ignore[arg-type]
    assert saver.consider_best(Cursor(0, 2, 2), _report(0.6, second), _Task())  # type: ignore[arg-type]
    assert first.waited and _shown(tmp_path) == (0.6, ["Classes"])
    saver.finish()
    assert second.waited and _shown(tmp_path) == (0.6, ["Classes", "Pictures"])
