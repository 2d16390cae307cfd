"""A folder of images and masks, as a user trains it: stopped, resumed, evaluated again, and its report."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from tests.ranks.runs import Runs, losses_of
from tests.unit.data.shapes import make_shapes

TRAINED = ("--workers", "2", "--epochs", "12", "--batch-size", "8", "--eval-every", "10", "--worst-samples", "4")


@pytest.mark.slow
def test_shapes_are_found_and_a_stopped_run_goes_on_as_it_would_have(tmp_path: Path) -> None:
    make_shapes(tmp_path / "shapes", ("train", "val"), 40)
    with Runs(tmp_path) as runs:
        straight = runs.train("shapes", *TRAINED, folder="straight")
        assert straight.end() == 0, straight.text()
        stopped = runs.train("shapes", *TRAINED, "--task", "segmentation", folder="stopped")
        stopped.wait_for_step(10)
        stopped.process.send_signal(signal.SIGTERM)
        assert stopped.check_stopped(signal.SIGTERM) >= 10
        resumed = runs.start("resume", "stopped", folder="stopped")
        assert resumed.end() == 0, resumed.text()
        again = runs.start("evaluate", "straight", "--workers", "1", "--checkpoint", "newest", "--json")
        assert again.end() == 0, again.text()
    assert "small_unet on shapes: segmentation" in straight.text()
    assert losses_of(tmp_path / "stopped") == losses_of(tmp_path / "straight")
    summary = straight.summary()
    assert summary["task"]["unit"] == "pixel" and summary["metrics"]["miou"] > 0.8
    found = json.loads(again.output.read_text())
    assert found["miou"] == pytest.approx(summary["metrics"]["miou"], abs=1e-6)
    sections = {s["title"]: s for s in json.loads((straight.folder / "evaluation.json").read_text())["sections"]}
    assert len(sections["Worst-predicted images"]["pictures"]) == 4
    assert [row[0] for row in sections["Classes of pixels"]["tables"][0]["rows"]] == ["0", "1", "2"]
    page = (straight.folder / "report.html").read_text()
    assert "pictures wide" in page and "of the pixels" in page


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["local(2)", "ps(mode=async)"])
def test_workers_that_step_alone_learn_it_too(tmp_path: Path, sync: str) -> None:
    make_shapes(tmp_path / "shapes", count=40)
    with Runs(tmp_path) as runs:
        run = runs.train("shapes", *TRAINED, "--sync", sync, folder="run")
        assert run.end() == 0, run.text()
    assert run.summary()["metrics"]["miou"] > 0.75
