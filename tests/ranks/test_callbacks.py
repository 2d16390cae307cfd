"""Callbacks of a user's own in whole runs: told everything on the leading rank, and never broken silently."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from torch.nn.functional import cross_entropy
from torchmetrics import CohenKappa

import echelon
from echelon.core.errors import UserError
from echelon.observe.callbacks import CheckpointInfo, EndInfo, EvaluationInfo, RunInfo, StepInfo
from echelon.observe.loggers.base import LoggedRun, LoggerSettings, Point
from tests.ranks.runs import SMALL, Runs

pytestmark = pytest.mark.timeout(400)

MINE = """
import os
from pathlib import Path


class Notes:
    def __init__(self, fails_at=0):
        self.fails_at, self.file = fails_at, Path("notes.txt")

    def on_start(self, run):
        self.note(f"start {run.start_step} {run.metric.name} {run.steps_per_epoch}")

    def on_step(self, step):
        self.note(f"step {step.step}")
        if step.step == self.fails_at:
            raise ValueError("no more")

    def on_evaluation(self, evaluation):
        self.note(f"evaluation {evaluation.step} {evaluation.metrics['top1'] > 0.3}")

    def on_checkpoint(self, checkpoint):
        self.note(f"checkpoint {checkpoint.step} {checkpoint.reason}")

    def on_end(self, end):
        self.note(f"end {end.status}")

    def note(self, text):
        with self.file.open("a") as file:
            file.write(f"{os.getpid()} {text}\\n")
"""
TRAIN = ("train", "digits", "--model", "mlp", "--batch-size", "256", "--epochs", "2", "--workers", "2", *SMALL)


class Hears:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.heard: list[object] = []
        self.on_start = self.on_step = self.on_evaluation = self.on_checkpoint = self.on_end = self.heard.append


class Chatters:
    """Logs more than there is room for."""

    def on_step(self, step: StepInfo) -> None:
        logging.warning("step %d %s", step.step, "x" * 1000)


class Lines(LoggerSettings):
    """A service of one's own: a file of steps for each identifier."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, run: RunInfo, known_as: str, new_id: str) -> tuple[LoggedRun, str]:
        return LinesOfRun(self.folder / f"{known_as or new_id}.txt"), known_as or new_id


class LinesOfRun(LoggedRun):
    def __init__(self, file: Path) -> None:
        self.file = file

    def log(self, points: Sequence[Point]) -> None:
        with self.file.open("a") as file:
            file.writelines(f"{point.step} {' '.join(sorted(point.values))}\n" for point in points)

    def finish(self, status: str) -> None:
        with self.file.open("a") as file:
            file.write(f"{status}\n")


@pytest.mark.long
def test_loss_metrics_and_a_logger_are_objects_at_the_start_and_the_resume(tmp_path: Path) -> None:
    run, service = tmp_path / "run", tmp_path / "service"
    service.mkdir()
    objects = {
        "loss": lambda outputs, classes: cross_entropy(outputs, classes, reduction="none"),
        "metrics": {"kappa": CohenKappa(task="multiclass", num_classes=10)},
        "loggers": [Lines(service)],
    }
    echelon.train("mlp", "digits", run, epochs=1, batch_size=256, workers=1, device="cpu", threads=1, **objects)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="the run's loss is 'object:function', and what is given from Python is"):
        echelon.resume(run, epochs=2, **{**objects, "loss": cross_entropy})  # type: ignore[arg-type]
    other = {**objects, "loss": lambda outputs, classes: 2 * cross_entropy(outputs, classes, reduction="none")}
    with pytest.raises(UserError, match=r"the loss is not the one that the run began with: .* in place of test_loss"):
        echelon.resume(run, epochs=2, **other)  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"loggers is a list: loggers=\['wandb'"):
        echelon.resume(run, epochs=2, loggers="wandb")  # type: ignore[arg-type]
    outcome = echelon.resume(run, epochs=2, **objects)  # type: ignore[arg-type]
    assert outcome.status == "completed" and "kappa" in outcome.metrics
    assert outcome.summary["commands"] == 2, "the resume that was refused is none of the run's time"
    (file,) = service.iterdir()
    lines = file.read_text().splitlines()
    evaluated = [line for line in lines if "test/kappa" in line]
    assert [line.partition(" ")[0] for line in evaluated] == ["6", "12"] and lines.count("completed") == 2


@pytest.mark.long
def test_objects_hear_in_this_process_and_its_log_is_kept_short(tmp_path: Path) -> None:
    hears, run = Hears(), tmp_path / "run"
    small: dict[str, Any] = {"epochs": 2, "batch_size": 256, "workers": 1, "device": "cpu", "threads": 1}
    echelon.train("mlp", "digits", run, **small, log_limit="10kb", callbacks=[hears, Chatters()])
    assert (run / "logs/rank0.log").stat().st_size <= 10_000
    assert (run / "logs/rank0.log.1").read_text().count("step 12 ") == 1, "the newest lines stay"
    assert [type(info) for info in hears.heard if isinstance(info, RunInfo | EndInfo)] == [RunInfo, EndInfo]
    assert [info.step for info in hears.heard if isinstance(info, StepInfo)] == list(range(1, 13))
    assert [info.step for info in hears.heard if isinstance(info, EvaluationInfo)] == [6, 12]
    saved = [info for info in hears.heard if isinstance(info, CheckpointInfo)]
    assert {info.step for info in saved} == {6, 12} and all(info.n_bytes > 0 for info in saved)


@pytest.mark.parametrize(
    "sync", [pytest.param("allreduce", marks=pytest.mark.slow), pytest.param("ps(mode=async)", marks=pytest.mark.long)]
)
def test_named_callbacks_hear_on_the_leading_rank(tmp_path: Path, sync: str) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    with Runs(tmp_path) as runs:
        run = runs.start(*TRAIN, "--sync", sync, "--callbacks", "mine:Notes")
        assert run.end() == 0, run.text()
    lines = [line.split(maxsplit=1) for line in (tmp_path / "notes.txt").read_text().splitlines()]
    assert len({pid for pid, _ in lines}) == 1
    said = [text for _, text in lines]
    assert said[0] == "start 0 top1 6" and said[-1] == "end completed"
    assert [text for text in said if text.startswith("step")] == [f"step {i}" for i in range(1, 13)]
    assert [text for text in said if text.startswith("evaluation")][-1] == "evaluation 12 True"
    assert any(text.startswith("checkpoint 12") for text in said)


@pytest.mark.parametrize(
    "sync", [pytest.param("allreduce", marks=pytest.mark.long), pytest.param("ps(mode=async)", marks=pytest.mark.slow)]
)
def test_a_callback_that_raises_ends_the_run_and_is_named(tmp_path: Path, sync: str) -> None:
    (tmp_path / "mine.py").write_text(MINE)
    with Runs(tmp_path) as runs:
        run = runs.start(*TRAIN, "--sync", sync, "--callbacks", "mine:Notes(fails_at=8)", folder="run")
        assert run.end() == 1, run.text()
        assert run.text().count("callback Notes.on_step failed at step 8: ValueError: no more") >= 1, run.text()
        assert "Traceback" not in run.text()
        assert run.records("end")[-1]["status"] == "failed"
        assert run.events("callback_failed")[0]["place"].endswith("in on_step")
        assert not run.events("worker_died")
