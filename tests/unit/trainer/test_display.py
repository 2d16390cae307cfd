"""The line of an epoch: of all of its steps, and of no other epoch's."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

from echelon.compression import read
from echelon.config import OptimizerConfig, RunConfig
from echelon.core.task import BEFORE_TASKS
from echelon.observe import screen
from echelon.observe.callbacks import Listeners
from echelon.observe.phases import PHASE_NAMES
from echelon.records.file import Recorder
from echelon.records.kinds import Start, Steps
from echelon.tasks.base import EvaluationResult
from echelon.trainer.display import Display, RunLength
from echelon.trainer.evaluate import EvaluationReport
from echelon.trainer.progress import RunProgress, other_losses


def window(epoch: int, step: int, seconds: float, waits: tuple[float, float], loss: float = 1.0) -> Steps:
    phases = [[0.0, 0.0, seconds - wait, wait, 0.0, 0.0] for wait in waits]
    return Steps(
        epoch=epoch, step=step, losses=[loss] * 4, correct=10, samples=40, seconds=seconds, phase_names=PHASE_NAMES,
        phases=phases,
    )  # fmt: skip


def test_a_search_of_the_learning_rate_is_shown_by_its_rate(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(screen, "QUIET_S", 0.0)
    config = RunConfig(optimizer=OptimizerConfig(lr_find=True))
    said, deadline_s = "", time.monotonic() + 30.0
    with Display(RunLength.of(config, 2000), BEFORE_TASKS, visible=True) as display:
        progress = RunProgress(Recorder(None), Listeners(), display)
        progress.window(window(0, 4, 1.0, (0.1, 0.3)), [])
        progress.epoch_ended(0, None)
        while "search" not in said and time.monotonic() < deadline_s:
            time.sleep(0.05)
            said += capsys.readouterr().out
    assert "search at learning rate 1.6e-06, step 4 of 100" in said and "epoch" not in said


def test_the_line_of_an_epoch_is_of_its_steps(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    display = Display(RunLength(16, 2, 8), BEFORE_TASKS, visible=True)
    progress = RunProgress(Recorder(None), Listeners(), display)
    progress.window(window(0, 4, 1.0, (0.1, 0.3), loss=3.0), [])
    progress.window(window(0, 8, 3.0, (0.3, 0.9), loss=1.0), [])
    progress.window(window(1, 12, 1.0, (0.5, 0.5)), [])  # it began before the first one's evaluation was over
    progress.epoch_ended(0, EvaluationReport(0.25, 100, 1.0, EvaluationResult({"top1": 0.5})))
    progress.epoch_ended(1, None)
    progress.epoch_ended(1, None)
    progress.epoch_ended(1, EvaluationReport(0.25, 100, 1.0, EvaluationResult({"top1": 0.75})))
    first, second, third = capsys.readouterr().out.splitlines()
    assert "epoch 1/2" in first and "evaluation top-1 0.5000" in first and "evaluation loss 0.2500" in first
    assert "train loss 2.0000" in first and "20 samples/s" in first and "communication 20%" in first
    assert (
        "epoch 2/2" in second and "40 samples/s" in second and "of step time: backward 50% communication 50%" in second
    )
    assert "steps)" not in first and second.endswith("(4 of 8 steps)")
    assert "top-1 0.7500" in third and "its steps were done before" in third and "samples/s" not in third


@pytest.mark.parametrize(("seconds", "other"), [(1.0, 6), (0.5, 4)], ids=["in no phase", "begun in the window before"])
def test_shares_of_a_step_add_up_to_100(capsys: pytest.CaptureFixture[str], seconds: float, other: int) -> None:
    display = Display(RunLength(16, 2), BEFORE_TASKS, visible=True)
    progress = RunProgress(Recorder(None), Listeners(), display)
    phases = [[0.005, 0.243, 0.284, 0.416, 0.003, 0.029]] * 2  # together 0.98 s
    progress.window(Steps(4, [1.0] * 4, seconds, samples=40, phase_names=PHASE_NAMES, phases=phases), [])
    progress.epoch_ended(0, None)
    shown = capsys.readouterr().out.partition("of step time: ")[2]
    assert sum(int(share) for share in re.findall(r"(\d+)%", shown)) == 100, shown
    assert "data" not in shown and "idle" not in shown and f"other {other}%" in shown


def test_a_run_that_an_earlier_version_began_is_told_that_sign_has_other_blocks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = Recorder(tmp_path)
    progress = RunProgress(record, Listeners(), Display(RunLength(16, 2), BEFORE_TASKS, visible=True))
    for version, codec, is_told in ((2, "sign", True), (2, "sign(block=4096)", False), (3, "sign", False)):
        record.write(Start(version=version))
        progress.begins(Start(start_step=1), RunConfig(), tmp_path, read(codec).codec)
        assert ("sign has blocks of 256 elements" in capsys.readouterr().out) == is_told
    record.close()


def test_a_run_that_an_earlier_version_began_is_told_that_its_losses_are_others() -> None:
    weighted = RunConfig(optimizer=OptimizerConfig(class_weights="2,2,2"))
    assert "--class-weights 2,2,2 are scaled to a mean of 1" in other_losses(Start(version=1), weighted)
    balanced = RunConfig(optimizer=OptimizerConfig(class_weights="balanced"))
    assert "evaluations" in (said := other_losses(Start(version=1), balanced)) and "scaled" not in said
    assert not other_losses(Start(version=2), weighted) and not other_losses(Start(version=1), RunConfig())
