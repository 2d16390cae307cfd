"""Sounds with transcripts, trained by commands: what is said in them is learnt, stopped, resumed and evaluated."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.ranks.runs import Runs
from tests.unit.data.test_transcripts import make_transcribed

LEARNT = ("--workers", "2", "--epochs", "14", "--augment", "none", "--checkpoint-every", "20")


@pytest.mark.slow
def test_tones_are_recognised_after_a_stop_and_a_resume(tmp_path: Path) -> None:
    data = make_transcribed(tmp_path / "spoken", ("train", "val"), 96)
    with Runs(tmp_path) as runs:
        run = runs.train(data, "--task", "speech-recognition", *LEARNT, folder="run")
        run.wait_for_step(30)
        os.kill(run.process.pid, signal.SIGINT)
        run.end()
        stopped = max(run.losses())
        again = runs.start("resume", run.folder, folder="run")
        assert again.end() == 0, again.text()
        assert 30 <= stopped < max(again.losses()) == 84
        last = again.records("evaluation")[-1]["metrics"]
        assert last["cer"] < 0.05 and last["wer"] < 0.15, last
        (section,) = json.loads((run.folder / "evaluation.json").read_text())["sections"]
        assert section["title"] == "Transcripts" and section["texts"][0]["title"].startswith("WER ")
        assert section["texts"][0]["text"].splitlines()[0] in (run.folder / "report.html").read_text()
        evaluated = runs.start("evaluate", run.folder, "--workers", "1", "--json")
        assert evaluated.end() == 0, evaluated.text()
    found = json.loads(evaluated.output.read_text())
    assert found["wer"] == pytest.approx(min(each["metrics"]["wer"] for each in again.records("evaluation")))


@pytest.mark.slow  # `tests/laws/test_tasks.py` trains it in each layout
def test_a_pipeline_has_the_losses_of_one_process(tmp_path: Path) -> None:
    data = make_transcribed(tmp_path / "spoken", ("train", "val"), 32)
    with Runs(tmp_path) as runs:
        trained = (data, "--epochs", "1", "--batch-size", "16")
        alone = runs.train(*trained, "--workers", "1", folder="alone")
        split = runs.train(*trained, "--workers", "2", "--parallel", "pp=2", folder="split")
        assert (alone.end(), split.end()) == (0, 0), alone.text() + split.text()
        assert split.losses() == pytest.approx(alone.losses(), rel=1e-4)
        one, two = (each.records("evaluation")[-1]["metrics"] for each in (alone, split))
        assert two == pytest.approx(one, rel=1e-4)
