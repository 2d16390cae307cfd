"""Studies as a user starts them: refused candidates, planted truths, and a study that is killed and goes on."""

from __future__ import annotations

import json
import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest
from pyarrow import parquet

import echelon
from echelon.study.folder import read_ends
from tests.ranks.run_many import python_path
from tests.ranks.runs import Run, Runs, read_lines
from tests.ranks.task_data import MAKERS

SMALL = ("--workers", "1", "--threads", "1", "--device", "cpu", "--loaders", "0")
ONCE, TWICE = "model=tests.ranks.slow_parts:once", "model=tests.ranks.slow_parts:twice"


def compare(runs: Runs, *arguments: str) -> Run:
    """Start `echelon compare ... --run s`."""
    # With the package beside these tests: another copy may be the installed one.
    environment = {"PYTHONPATH": python_path()}
    return runs.start("compare", *arguments, "--run", str(runs.root / "s"), folder="s", environment=environment)


def rows(folder: Path) -> list[dict]:
    """Read the runs' table."""
    found: list[dict] = parquet.read_table(folder / "runs.parquet").to_pylist()
    return found


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_refused_candidate_stops_no_other(tmp_path: Path) -> None:
    with Runs(tmp_path) as runs:
        tries = ("--try", "sync=allreduce", "--try", "sync=local(3, overlap=3)", "--seeds", "1")
        run = compare(runs, "digits", *SMALL, "--epochs", "1", *tries)
        assert run.end() == 1, run.text()
        by_status = {r["status"]: r for r in rows(run.folder)}
        assert by_status.keys() == {"completed", "refused"}
        assert "--sync: " in by_status["refused"]["message"] and "overlap" in by_status["refused"]["message"]
        assert "overlap" in (run.folder / "report.html").read_text()
        assert "not measured (refused: " in run.text() and "Traceback" not in run.text()
        assert not (run.folder / "warm-up").exists()
        assert (run.folder / "runs" / by_status["completed"]["run"] / "report.html").exists()
        again = compare(runs)
        assert again.end() == 1, again.text()
        assert "2 of 2 runs are there already" in again.text()


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_planted_truths_are_found(tmp_path: Path) -> None:
    with Runs(tmp_path) as runs:
        tries = [f"--try={ONCE}", f"--try={TWICE}", f"--try={ONCE}", f"--try={ONCE}, lr=1e6", "--seeds", "3"]
        run = compare(runs, "digits", *SMALL, "--epochs", "10", "--lr", "0.05", *tries)
        assert run.end(900) == 0, run.text()
        said = json.loads((run.folder / "summary.json").read_text())
        verdicts = [(c["verdict"], c["sentence"]) for c in said["comparisons"]]
        assert [v for v, _ in verdicts] == ["baseline", "no benefit here", "no difference", "did not converge"], (
            verdicts
        )
        found = re.search(r"([\d.]+)x \(([\d.]+)x to ([\d.]+)x\) as long", verdicts[1][1])
        assert found and all(1.8 <= float(bound) <= 2.2 for bound in found.groups()), verdicts[1]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGTERM])
def test_a_study_that_is_killed_goes_on_with_what_is_missing(tmp_path: Path, signum: int) -> None:
    with Runs(tmp_path) as runs:
        tries = (f"--try={ONCE}", f"--try={TWICE}", "--seeds", "1")
        run = compare(runs, "digits", *SMALL, "--epochs", "4", *tries)
        second = run.folder / "runs" / "0-01-tests.ranks.slow-parts-t-s0"
        run.wait_for(lambda: [r for r in read_lines(second) if r["kind"] == "steps"], "a step of the second run")
        os.kill(run.process.pid, signum)
        assert run.end(100) == (-signum if signum == signal.SIGKILL else 128 + signum)
        assert run.left_behind(100.0) == []
        first = {r["run"]: r["seconds"] for r in read_lines(run.folder) if r["kind"] == "run"}
        assert len(first) == 1
        again = compare(runs)
        assert again.end() == 0, again.text()
        assert "1 of 2 runs are there already" in again.text()
        assert [r["status"] for r in rows(run.folder)] == ["completed"] * 2
        assert len([r for r in read_lines(second) if r["kind"] == "start"]) == 1, "it was resumed, not done anew"


@pytest.mark.long
def test_a_study_from_python(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    tries = ["compression=none", "compression=int8"]
    small = {"epochs": 1, "max_steps": 3, "workers": 2, "device": "cpu", "threads": 1}
    outcome = echelon.compare(tries, "mlp", run="study", seeds=1, **small)
    assert repr(outcome) == "StudyOutcome(completed, 2 of 2 runs, study)"
    assert list(outcome.runs["candidate"]) == tries and set(outcome.runs["steps"]) == {3}
    took = {name: end.seconds for name, end in read_ends(Path("study")).items()}
    assert took == dict(zip(outcome.runs["run"], outcome.runs["whole_s"], strict=True))  # live table and page agree
    assert outcome.words and "study/report.html" in outcome._repr_html_()
    again = echelon.compare(run="study")  # nothing is missing
    assert again.status == "completed" and len(again.report.runs) == 2


@dataclass(frozen=True)
class Judged:
    """What a study of a task says of a rate of learning that is far too small, beside one that is not.

    Attributes:
        metric: column of the runs' table with the primary metric, which is better on the side of `direction`.
        verdicts: the verdict is one of these: how long such short runs take is chance, so that "faster" may be.
    """

    task: str
    metric: str
    direction: str
    seeds: int
    verdicts: tuple[str, ...]
    words: str
    target: str


JUDGED = [
    Judged(
        "text_classification", "top1", "max", 1, ("did not converge",),
        r"its accuracy of [\d.]+% is that of guessing",
        r"The target is [\d.]+%: 0.5 points below the worst final accuracy of lr=0.01",
    ),
    Judged(
        "speech_classification", "top1", "max", 1, ("did not converge",),
        r"its accuracy of [\d.]+% is that of guessing",
        r"The target is [\d.]+%: 0.5 points below the worst final accuracy of lr=0.01",
    ),
    Judged(
        "regression", "rmse", "min", 3, ("no benefit here", "faster at a loss"),
        r"final error worse by \d[\d.]* % \(\+",
        r"The target is [\d.]+: 0.5 % above the worst final error of lr=0.01",
    ),
]  # fmt: skip


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("judged", JUDGED, ids=lambda judged: judged.task)
def test_candidates_are_judged_by_the_primary_metric_of_their_task_in_its_direction(
    judged: Judged, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = MAKERS[judged.task](tmp_path)
    settings = {name.removeprefix("data."): value for name, value in found.items() if name != "data.source"}
    small = {"epochs": 4, "batch_size": 16, "workers": 1, "device": "cpu", "threads": 1, "loaders": 0}
    tries = ["lr=0.01", "lr=0.00001"]
    outcome = echelon.compare(
        tries, "auto", str(found["data.source"]), run="study", seeds=judged.seeds, **settings, **small
    )
    first, second = (outcome.runs[outcome.runs["candidate"] == name][judged.metric].mean() for name in tries)
    assert (first > second) == (judged.direction == "max"), "the second is the worse one"
    _, verdict = json.loads(Path("study/summary.json").read_text())["comparisons"]
    assert verdict["candidate"] == tries[1] and verdict["verdict"] in judged.verdicts, verdict
    assert verdict["points"]["value"] < 0, "worse is negative in either direction"
    assert re.search(judged.words, verdict["sentence"]), verdict["sentence"]
    assert any(re.match(judged.target, each) for each in outcome.words), outcome.words
    assert set(parquet.read_table("study/runs.parquet")["direction"].to_pylist()) == {judged.direction}
