"""A checkpoint evaluated again: the same figures on any number of processes, of any checkpoint, on other data."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

import echelon
from echelon.core.errors import UserError
from tests.ranks.runs import Runs, marked_processes

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A run of two epochs with a moving average, and BatchNorm in its model."""
    path = tmp_path_factory.mktemp("evaluate")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(path / "state"))
        described = {"epochs": 2, "ema": 0.9, "device": "cpu", "checkpoint_every": "5"}
        echelon.train("small_cnn", "digits", path / "run", workers=1, **described)
        yield path


def test_any_number_of_workers_finds_the_same(folder: Path) -> None:
    alone = echelon.evaluate(folder / "run", workers=1)
    newest = echelon.evaluate(folder / "run", workers=1, checkpoint="newest")
    with Runs(folder) as runs:
        run = runs.start("evaluate", folder / "run", "--workers", "3", "--json")
        code, text = run.end(), run.output.read_text()
        other = runs.start("evaluate", folder / "run", "--checkpoint", "newest", "--workers", "2", "--json")
        assert (code, other.end()) == (0, 0), run.errors() + other.errors()
    assert json.loads(text) == pytest.approx(alone, abs=1e-6)
    assert json.loads(other.output.read_text()) == pytest.approx(newest, abs=1e-6)
    assert re.search(r"echelon: 359 samples evaluated in \S+ m?s, with the checkpoint of step \d+\n", run.errors())
    with pytest.raises(UserError, match=r"--checkpoint 7: .* has best, newest, \d+"):
        echelon.evaluate(folder / "run", workers=1, checkpoint="7")


def test_a_file_that_says_nothing_of_a_split_is_evaluated_whole(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def table(name: str, parts: tuple[str, ...]) -> Path:
        head = "a,b,y" + ",fold" * bool(parts)
        rows = [f"{i},{i * i % 7},{'xy'[i % 2]}{',' + parts[i % len(parts)] if parts else ''}" for i in range(60)]
        (tmp_path / name).write_text("\n".join([head, *rows]) + "\n")
        return tmp_path / name

    own = table("own.csv", ("train", "val", "test"))
    settings = {"target": "y", "split": "fold", "max_steps": 4, "batch_size": 8, "device": "cpu", "workers": 1}
    echelon.train("auto", own, tmp_path / "run", **settings)  # type: ignore[arg-type]
    for data, said in (
        (table("other.csv", ()), f"echelon: all 60 samples of {tmp_path}/other.csv evaluated in"),
        (table("parts.csv", ("train", "test")), f"echelon: the test part of {tmp_path}/parts.csv, 30 samples, eval"),
        (own, "echelon: 20 samples evaluated in"),
    ):
        echelon.evaluate(tmp_path / "run", data=str(data), workers=1)
        assert said in capfd.readouterr().err


def test_ctrl_c_ends_an_evaluation_and_a_mistake_is_one_line(folder: Path) -> None:
    with Runs(folder) as runs:
        run = runs.start("evaluate", folder / "run", "--workers", "2")
        run.wait_for(lambda: len(marked_processes(run.mark)) > 3, "its processes")
        os.killpg(run.process.pid, signal.SIGINT)
        assert run.end() == 130 and "Traceback" not in run.text(), run.text()
        refused = runs.start("evaluate", folder / "run", "--workers", "2", "--data", "nothing")
        code, said = refused.end(), [line for line in refused.errors().splitlines() if not line.endswith(" so far")]
        assert code == 2 and len(said) == 1, refused.text()
