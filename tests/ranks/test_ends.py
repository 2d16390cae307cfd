"""Runs that end before their last step: no better metric, or the time that a command has."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import Tensor, nn

import echelon
from echelon.models.base import ModelInput
from echelon.observe.callbacks import Callback, CheckpointInfo
from tests.attack.faulty_disk import SmallDisk, small_disk
from tests.attack.scenario import CannotRunHere
from tests.ranks.run_many import python_path
from tests.ranks.runs import SMALL, Run, Runs

MODEL = ("train", "digits", "--model", "mlp", "--eval-every", "1", *SMALL)
LONG = ("--epochs", "100000", "--eval-every", "0", "--checkpoint-every", "20", "--io-patience", "2s")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    """A disk of its own, which can be filled."""
    try:
        with small_disk(tmp_path / "disk") as mounted:
            yield mounted
    except CannotRunHere as reason:
        pytest.skip(str(reason))


def test_a_run_whose_metric_does_not_improve_stops_and_a_resume_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    outcome = echelon.train("mlp", "digits", run, lr=0, epochs=40, early_stop=2, workers=1, threads=1, device="cpu")
    words = " ".join(outcome.words)
    assert outcome.status == "completed" and outcome.summary["epochs"] == 3
    assert "stopped early: no better top-1 in 2 evaluations" in words
    before = (run / "record.jsonl").read_bytes()
    assert echelon.resume(run).status == "completed"
    assert "nothing to do" in capsys.readouterr().err and (run / "record.jsonl").read_bytes() == before


class StopsInStep4(nn.Module):
    """A model in whose fourth step of training the process is asked to stop."""

    def __init__(self, data: ModelInput) -> None:
        super().__init__()
        self.layer, self.steps = nn.Linear(64, data.classes), 0  # digits have 8x8

    def forward(self, x: Tensor) -> Tensor:
        """Compute, and ask."""
        if self.training and len(x) == 128:  # who tries it has fewer
            self.steps += 1
            if self.steps == 4:
                os.kill(os.getpid(), signal.SIGTERM)
        logits: Tensor = self.layer(x.flatten(1))
        return logits


def test_a_run_that_is_stopped_in_its_last_step_is_evaluated_when_it_is_resumed(tmp_path: Path) -> None:
    with Runs(tmp_path) as runs:
        command = ("train", "digits", "--model", "tests.ranks.test_ends:StopsInStep4", "--workers", "1", *SMALL)
        environment = {"PYTHONPATH": python_path()}
        run = runs.start(*command, "--max-steps", "4", folder="run", environment=environment)
        assert run.end() == 143, run.text()
        assert run.records("end")[-1]["status"] == "stopped" and not run.records("evaluation")
        again = runs.start("resume", str(run.folder), folder="run", environment=environment)
        assert again.end() == 0, again.text()
        assert [each["step"] for each in again.records("evaluation")] == [4] and max(again.losses()) == 4


@pytest.mark.parametrize(
    "sync", [pytest.param("local(3)", marks=pytest.mark.long), pytest.param("ps(mode=async)", marks=pytest.mark.slow)]
)
def test_all_ranks_stop_early_and_more_patience_goes_on_where_they_stopped(tmp_path: Path, sync: str) -> None:
    with Runs(tmp_path) as runs:
        run = runs.start(*MODEL, "--workers", "2", "--sync", sync, "--lr", "0", "--epochs", "40", "--early-stop", "1",
                         folder="run")  # fmt: skip
        assert run.end() == 0, run.text()
        (end,) = run.records("end")
        assert (end["reason"], end["stagnant"]) == ("early_stop", 1) and "stopped early" in run.text()
        evaluated = len(run.records("evaluation"))
        again = runs.start("resume", str(run.folder), "--early-stop", "2", folder="run")
        assert again.end() == 0, again.text()
        assert again.records("end")[-1]["stagnant"] == 2 and len(run.records("evaluation")) > evaluated


@pytest.mark.parametrize(
    "sync", [pytest.param("allreduce", marks=pytest.mark.long), pytest.param("ps(mode=async)", marks=pytest.mark.slow)]
)
def test_a_command_ends_in_its_time_with_an_evaluation_a_checkpoint_and_a_report(tmp_path: Path, sync: str) -> None:
    with Runs(tmp_path) as runs:
        run = runs.start(*MODEL, "--workers", "2", "--sync", sync, "--epochs", "100000", "--eval-every", "0",
                         "--max-time", "12s", folder="run")  # fmt: skip
        assert run.end() == 0, run.text()
        (end,), (evaluation,) = run.records("end"), run.records("evaluation")
        assert end["reason"] == "max_time" and evaluation["step"] == run.records("checkpoint")[-1]["step"]
        began_s = run.records("start")[0]["t"] - run.records("start")[0]["launched_t"]
        assert run.records("command_end")[0]["seconds"] < max(12, began_s + 5), "a busy machine may start late"
        assert f"`echelon resume {run.folder}` goes on" in run.text()


def test_a_run_that_diverges_has_failed_in_its_own_words(tmp_path: Path) -> None:
    with Runs(tmp_path) as runs:
        run = runs.start(*MODEL, "--workers", "2", "--lr", "1e30", "--epochs", "2", folder="run")
        assert run.end() == 1, run.text()
        messages = [event["message"] for event in run.events("diverged")]
        assert all("start a new run with a lower --lr" in m for m in messages) and not run.events("refused")
        summary = run.summary()
        assert summary["status"] == "failed" and summary["message"] in messages
        assert "Traceback" not in run.errors() and "no restart" not in run.text()


@pytest.mark.root
@pytest.mark.long
@pytest.mark.parametrize("sync", ["allreduce", "ps(mode=async)"])
def test_a_run_that_has_trained_and_whose_disk_stays_full_has_failed(
    tmp_path: Path, disk: SmallDisk, sync: str
) -> None:
    with Runs(tmp_path) as runs:
        run = runs.start(*MODEL, "--workers", "2", "--sync", sync, *LONG, folder="disk/run")
        run.wait_for(lambda: run.records("checkpoint"), "a checkpoint")
        disk.fill()
        check_failed(run)
        disk.free()
        resumed = runs.start("resume", "disk/run", "--max-steps", "1", folder="disk/run")
        assert resumed.end() == 2 and "is less than what is done" in resumed.text()


def check_failed(run: Run) -> None:
    """Check that a run has ended with the exit code of one that failed, and says what continues it."""
    assert run.end() == 1, run.text()
    last = run.errors().splitlines()[-1]
    assert "No space left" in last and "continue with `echelon resume" in last, run.text()
    assert "Traceback" not in run.text() and not run.records("event", "refused"), run.text()


def test_a_run_in_this_process_that_has_trained_and_whose_disk_stays_full_has_failed(
    tmp_path: Path, disk: SmallDisk
) -> None:
    class Fills(Callback):
        """Fills the disk once something is saved."""

        def on_checkpoint(self, checkpoint: CheckpointInfo) -> None:
            """Take all room."""
            disk.fill()

    with pytest.raises(echelon.RunFailed, match=r"No space left on device.*continue with `echelon"):
        echelon.train("mlp", "digits", disk.folder / "run", epochs=100, workers=1, threads=1, device="cpu",
                      checkpoint_every=1, io_patience="1s", callbacks=[Fills()])  # fmt: skip
