"""Loggers reach their services' offline modes and local files, go on with a run, and do not end one."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from echelon.core.errors import UserError
from echelon.core.task import BEFORE_TASKS
from echelon.observe.callbacks import EndInfo, EvaluationInfo, RunInfo, WindowInfo
from echelon.observe.loggers import LOGGERS, check_loggers
from echelon.observe.loggers.base import BackgroundLogger, LoggedRun, LoggerSettings, Point

DEADLINE_S = 120.0


def run_in(folder: Path) -> RunInfo:
    folder.mkdir(exist_ok=True)
    return RunInfo(folder, {"optimizer.lr": 0.1, "data.source": "digits"}, BEFORE_TASKS.primary, "top1")


def told(
    settings: LoggerSettings, name: str, folder: Path, step: int, status: str = "completed", end_s: float = DEADLINE_S
) -> list[str]:
    """Tell a logger of a run from its start to its end; returns what it said."""
    said: list[str] = []
    logger = BackgroundLogger(name, settings, said.append, end_s)
    logger.on_start(run_in(folder))
    logger.on_window(WindowInfo(step, 0, [2.0, 1.5], 0.05, 1000.0, 0.75))
    logger.on_evaluation(EvaluationInfo(step, 0, 1.25, {"top1": 0.5, "roc_auc": None}, 0.1, 100))
    logger.on_end(EndInfo(status))
    return said


def id_of(folder: Path, name: str) -> str:
    return (folder / "loggers" / name).read_text()


@pytest.mark.long
def test_wandb_writes_offline_files_and_goes_on_with_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="Weights & Biases is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_CACHE_DIR", str(tmp_path / "cache"))
    folder = tmp_path / "run"
    assert told(LOGGERS.build("wandb(project=tests, tags=a+b)"), "wandb", folder, 4, "stopped") == []
    first = id_of(folder, "wandb")
    assert told(LOGGERS.build("wandb(project=tests)"), "wandb", folder, 8) == []
    assert id_of(folder, "wandb") == first
    ends, rows = time.monotonic() + DEADLINE_S, []
    while len(rows) < 4 and time.monotonic() < ends:  # its service writes the end of a file after the run has finished
        files = sorted((folder / "wandb").glob(f"offline-run-*-{first}/run-{first}.wandb"))
        rows = [row for file in files for row in wandb_rows(file)]
    assert [row["trainer/step"] for row in rows] == [4, 4, 8, 8]
    assert rows[0]["train/top1"] == 0.75 and rows[1] | {"test/loss": 1.25, "test/top1": 0.5} == rows[1]


def wandb_rows(file: Path) -> list[dict[str, float]]:
    """Read a file of LevelDB's log format: blocks of 32 KiB, whose pieces have a header of 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    data, at, message, rows = file.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if -at % 32768 < 7:
            at += -at % 32768
            continue
        message, at = message + data[at + 7 : at + 7 + length], at + 7 + length
        if kind not in (1, 4):  # neither whole nor the last piece
            continue
        record = wandb_internal_pb2.Record()
        record.ParseFromString(message)
        message = b""
        if record.WhichOneof("record_type") == "history":
            rows.append({i.key or "/".join(i.nested_key): json.loads(i.value_json) for i in record.history.item})
    return rows


@pytest.mark.long
def test_mlflow_writes_its_database_and_goes_on_with_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="MLflow is not installed")
    pytest.importorskip("sqlalchemy", reason="MLflow's database needs sqlalchemy")
    uri, folder = f"sqlite:///{tmp_path}/mlflow.db", tmp_path / "run"
    logger = LOGGERS.build(f'mlflow(experiment=tests, uri="{uri}")')
    log_batch, failures = mlflow.MlflowClient.log_batch, ["the settings were not taken", "nor were they then"]

    def refusing(client: Any, run_id: str, *args: Any, **kwargs: Any) -> None:
        if failures:
            raise RuntimeError(failures.pop())
        log_batch(client, run_id, *args, **kwargs)

    monkeypatch.setattr(mlflow.MlflowClient, "log_batch", refusing)  # what was made before is found by the next try
    assert len(told(logger, "mlflow", folder, 4, "stopped")) == 2
    client, run_id = mlflow.MlflowClient(uri), id_of(folder, "mlflow")
    assert client.get_run(run_id).info.status == "KILLED"
    assert told(logger, "mlflow", folder, 8) == []
    run = client.get_run(run_id)
    assert run.info.status == "FINISHED" and run.info.run_name == "run" and run.data.params["optimizer.lr"] == "0.1"
    history = client.get_metric_history(run_id, "train/loss")
    assert [(m.step, m.value) for m in sorted(history, key=lambda m: m.step)] == [(4, 1.5), (8, 1.5)]
    assert run.data.metrics["test/top1"] == 0.5 and run.data.metrics["train/top1"] == 0.75
    assert len(client.search_runs([run.info.experiment_id])) == 1


@pytest.mark.long
def test_trackio_writes_its_database_and_goes_on_with_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    pytest.importorskip("trackio", reason="Trackio is not installed")
    folder = tmp_path / "run"
    logger = LOGGERS.build("trackio(project=tests)")
    assert told(logger, "trackio", folder, 4) == []
    name = id_of(folder, "trackio")
    assert told(logger, "trackio", folder, 8) == []
    assert id_of(folder, "trackio") == name


@dataclass(frozen=True)
class Flaky(LoggerSettings):
    """A service that is away for a while, or for good."""

    package = "nothing"
    away: int
    taken: list[Point] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)

    def begin(self, run: RunInfo, known_as: str, new_id: str) -> tuple[LoggedRun, str]:
        self.calls.append("begin")
        if len(self.calls) <= self.away:
            raise ConnectionError("no route\nto host")
        return _Taken(self), known_as or new_id


class _Taken(LoggedRun):
    def __init__(self, service: Flaky) -> None:
        self._service = service

    def log(self, points: Sequence[Point]) -> None:
        self._service.taken.extend(points)

    def finish(self, status: str) -> None:
        self._service.calls.append(status)


def test_a_service_that_comes_back_gets_everything_and_that_is_said_once(tmp_path: Path) -> None:
    service = Flaky(1)
    said = told(service, "flaky", tmp_path / "run", 4)
    assert [point.step for point in service.taken] == [4, 4] and service.calls[-1] == "completed"
    assert said[0].startswith("--logger flaky: ConnectionError: no route to host; training goes on")
    assert len(said) == 2 and said[1].startswith("--logger flaky works again after")


def test_a_service_that_stays_away_ends_no_run(tmp_path: Path) -> None:
    said = told(Flaky(1000), "flaky", tmp_path / "run", 4, end_s=1.5)
    assert len(said) == 2 and "training goes on" in said[0] and "has not taken everything" in said[1]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("wand", r"--logger: unknown logger 'wand': did you mean wandb\? known: mlflow, trackio, wandb"),
        ("wandb(projct=a)", r"wandb has no setting 'projct': did you mean project\?"),
        ("wandb+wandb", "wandb is named twice"),
    ],
)
def test_a_logger_that_is_none_is_refused(text: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: name)
    with pytest.raises(UserError, match=reason):
        check_loggers(text)


def test_a_missing_package_is_refused_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"^--logger wandb needs the package wandb: pip install 'echelon\[wandb\]'$"):
        check_loggers("wandb(project=a)")
