"""Texts, trained by commands: the same function in every layout, a report with what the model writes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.ranks.runs import Run, Runs

WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "saw", "one", "dog")
SHORT = ("--context", "16", "--batch-size", "16", "--epochs", "1", "--max-steps", "3", "--holdout", "0.1")


def long_text(file: Path) -> Path:
    file.write_text("\n".join(" ".join(WORDS[(i * j) % 10] for j in range(1, 7)) for i in range(60)))
    return file


def written(run: Run) -> str:
    """Return the text in a run's report."""
    sections = json.loads((run.folder / "evaluation.json").read_text())["sections"]
    (text,) = [each["text"] for section in sections for each in section.get("texts", [])]
    assert text.splitlines()[0].split(" ")[0] in (run.folder / "report.html").read_text()
    return str(text)


@pytest.mark.parametrize(
    "layouts",
    [pytest.param(("pp=2",), marks=pytest.mark.slow), pytest.param(("fsdp=2", "tp=2"), marks=pytest.mark.slow)],
    ids=lambda layouts: " ".join(layouts),
)
def test_a_text_trains_the_same_in_a_layout_and_is_evaluated_without_its_cache(
    tmp_path: Path, layouts: tuple[str, ...]
) -> None:
    file = long_text(tmp_path / "long.txt")
    trained = ("--task", "language-modelling", "--tokeniser", "bpe(300)", "--lr", "1e-3", *SHORT)
    with Runs(tmp_path) as runs:
        alone = runs.train(file, *trained, "--workers", "1", folder="alone")
        assert alone.end() == 0, alone.text()
        text, perplexity = written(alone), alone.records("evaluation")[-1]["metrics"]["perplexity"]
        for layout in layouts:
            run = runs.train(file, *trained, "--workers", "2", "--parallel", layout, folder=layout)
            assert run.end() == 0, run.text()
            assert run.losses() == pytest.approx(alone.losses(), rel=1e-4), layout
            assert run.records("evaluation")[-1]["metrics"]["perplexity"] == pytest.approx(perplexity, rel=1e-4)
            assert written(run) == text
        shutil.rmtree(tmp_path / "data")
        again = runs.start("evaluate", alone.folder, "--workers", "1", "--json")
        assert again.end() == 0, again.text()
        assert json.loads(again.output.read_text())["perplexity"] == pytest.approx(perplexity, rel=1e-5)
        assert not (tmp_path / "data").exists(), "the tokeniser is the run's own"


@pytest.mark.long
def test_texts_of_a_table_are_classified_on_two_workers_as_on_one(tmp_path: Path) -> None:
    rows = [
        f"{WORDS[i % 7]} {WORDS[i % 9]} {'mat ' * (i % 4)}{'dog' if i % 3 else 'cat'},{i % 3 > 0}" for i in range(90)
    ]
    folder = tmp_path / "texts"
    folder.mkdir()
    for part, chosen in (("train", rows[:70]), ("test", rows[70:])):
        (folder / f"{part}.csv").write_text("\n".join(["text,label", *chosen]) + "\n")
    trained = (folder, "--task", "text-classification", "--input", "text", "--target", "label", "--epochs", "3")
    with Runs(tmp_path) as runs:
        one, two = (runs.train(*trained, "--workers", n, folder=n) for n in ("1", "2"))
        assert (one.end(), two.end()) == (0, 0), one.text() + two.text()
    assert two.losses() == pytest.approx(one.losses(), rel=1e-4)
    losses = list(one.losses().values())
    assert losses[-1] < losses[0]
    sections = json.loads((two.folder / "evaluation.json").read_text())["sections"]
    assert "Worst-predicted texts" in [section["title"] for section in sections]
    assert (two.folder / "tokeniser.json").is_file()
