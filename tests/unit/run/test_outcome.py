"""What came of a run, from its folder alone."""

from __future__ import annotations

import re
import sys
from contextlib import closing
from pathlib import Path

import pytest

import echelon
from echelon import api
from echelon.core.errors import UserError
from echelon.records.events import RunDiverged, WorkerDied
from echelon.records.file import Recorder
from echelon.records.kinds import Evaluation, Start, Steps
from echelon.reporting.report.records import RunRecord
from echelon.run.outcome import Outcome, failed_log, history_of


def _steps(step: int, epoch: int, loss: float, count: int = 2) -> Steps:
    return Steps(step, [loss] * count, 0.5 * count, epoch, samples=10 * count, wire_bytes=100.0 * count)


def test_a_history_has_a_row_for_each_evaluation_and_each_epoch_without_one() -> None:
    record = RunRecord("run", [
        Start(start_step=0), _steps(2, 0, 4.0), _steps(4, 1, 2.0), _steps(6, 2, 9.0), Start(start_step=4),
        _steps(6, 2, 1.0), Evaluation(6, 2, 0.5, {"top1": 0.9}, 0.1, 30),
    ])  # fmt: skip
    rows = history_of(record)
    assert [(row.epoch, row.step, row.train_loss, row.eval_loss) for row in rows] == [
        (1, 2, 4.0, None), (2, 4, 2.0, None), (3, 6, 1.0, 0.5),
    ]  # fmt: skip
    assert [(row.seconds, row.samples_per_s, row.wire_bytes) for row in rows] == [(1.0, 20.0, 200.0)] * 3
    assert rows[-1].metrics == {"top1": 0.9}


def test_a_window_that_an_evaluation_divides_counts_by_its_share() -> None:
    """Asynchronous workers go on while one of them evaluates."""
    windows = [_steps(4, 0, 2.0, 4), _steps(8, 1, 1.0, 4)]
    evaluations = [Evaluation(2, 0, 1.0, {}, 0.1, 1), Evaluation(8, 1, 0.5, {}, 0.1, 1)]
    first, second = history_of(RunRecord("run", [*windows, *evaluations]))
    assert (first.samples, second.samples, first.wire_bytes + second.wire_bytes) == (20, 60, 800)
    assert second.train_loss == pytest.approx((2 * 2.0 + 4 * 1.0) / 6)


def test_an_outcome_is_one_short_line_and_a_table() -> None:
    summary = {"metrics": {"top1": 0.98765}, "wall_s": 12.34, "epochs": 3.0, "steps": 24, "workers": 2, "step_s": None}
    outcome = Outcome("completed", Path("runs/a<b"), summary)
    assert repr(outcome) == "Outcome(completed, top1 0.9877, seconds 12.3, epochs 3, runs/a<b)"
    table = outcome._repr_html_()
    assert "<td>0.9877</td>" in table and "runs/a&lt;b/report.html" in table
    assert "best" not in table
    better = Outcome("completed", Path("x"), {**summary, "best_top1": 0.99, "best_step": 16})._repr_html_()
    assert "<th>best top1</th><td>0.99 at step 16, of which model() has the weights</td>" in better
    assert repr(Outcome("failed", Path("runs/x"), {})) == "Outcome(failed, runs/x)"


def test_a_history_without_pandas_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match=r"^a history is a data frame of pandas, .*: pip install pandas$"):
        Outcome("completed", tmp_path, {}).history  # noqa: B018


def test_a_run_that_failed_is_raised_in_one_line_with_the_log_of_the_process_that_died(tmp_path: Path) -> None:
    with closing(Recorder(tmp_path)) as record:
        record.write(WorkerDied(message="rank 1 died", rank=1))
    (tmp_path / "logs").mkdir()
    log = tmp_path / "logs" / "rank1.log"
    failed = Outcome("failed", tmp_path, {"message": "rank 1 died:\nout of luck."})
    with pytest.raises(echelon.RunFailed, match=rf"^rank 1 died: out of luck; log: {re.escape(str(log.parent))}$"):
        api._ended(failed, None)
    log.touch()
    with pytest.raises(echelon.RunFailed, match=rf"; log: {re.escape(str(log))}$") as raised:
        api._ended(failed, None)
    assert raised.value.outcome.status == "failed"
    with closing(Recorder(tmp_path)) as record:
        record.write(RunDiverged("NaN", rank=0))
    (tmp_path / "logs" / "rank0.log").touch()
    assert failed_log(tmp_path) == tmp_path / "logs" / "rank0.log", "the newest"
    with closing(Recorder(tmp_path)) as record:
        record.write(WorkerDied("rank 0 died, which was started as rank 1", rank=0, log="rank1"))
    assert failed_log(tmp_path) == log
    assert api._ended(Outcome("stopped", tmp_path, {}), None).status == "stopped"
