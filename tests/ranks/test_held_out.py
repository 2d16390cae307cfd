"""A test set beside the validation set: no choice is made by it, and it tells what the best checkpoint is worth."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import echelon
from echelon.config import DataConfig
from echelon.data import Source, open_data
from echelon.data.images import ImageArray
from echelon.records.file import read_records
from echelon.records.kinds import Evaluation

NAME = "tests.ranks.test_held_out:digits"


def digits() -> Source:
    """Return the digits, of whose evaluation set 100 are held out for a test."""
    source = open_data(DataConfig(source="digits"), 0)
    assert isinstance(source.evaluation, ImageArray)
    pixels, labels = source.evaluation.pixels, source.evaluation.labels
    validation, test = ImageArray(pixels[100:], labels[100:]), ImageArray(pixels[:100], labels[:100])
    return replace(source, evaluation=validation, test=test, info=replace(source.info, eval_size=len(validation)))


def check(folder: Path, outcome: echelon.Outcome) -> None:
    evaluations = list(read_records(folder, Evaluation))
    # Of equal scores the lower loss is better.
    ranks = [(line.metrics["top1"] or 0.0, -line.loss) for line in evaluations]
    improved = [all(rank > before for before in ranks[:i]) for i, rank in enumerate(ranks)]
    assert [bool(line.test_metrics) for line in evaluations] == improved
    last = max(i for i, better in enumerate(improved) if better)
    assert outcome.metrics == pytest.approx(dict(evaluations[last].test_metrics), nan_ok=True)
    top1 = outcome.metrics["top1"]
    assert top1 is not None and top1 > 0.6 and round(top1 * 100, 6) % 1 == 0


def test_the_test_set_is_seen_when_a_checkpoint_is_the_best(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "run"
    outcome = echelon.train(data=NAME, model="mlp", epochs=4, lr=0.5, run=run, workers=1, device="cpu", threads=1)
    check(run, outcome)
    assert "evaluation top-1" in capfd.readouterr().out
    said = (run / "report.html").read_text()
    assert "the checkpoint was chosen by validation data" in said and "test top-1" in said


@pytest.mark.parametrize(
    "sync", [pytest.param("ps(mode=async)", marks=pytest.mark.long), pytest.param("allreduce", marks=pytest.mark.slow)]
)
def test_several_workers_agree_on_when(tmp_path: Path, sync: str) -> None:
    run = tmp_path / "run"
    outcome = echelon.train(data=NAME, model="mlp", epochs=3, run=run, workers=2, device="cpu", threads=1, sync=sync)
    check(run, outcome)
    evaluated = echelon.evaluate(run, trust=True)
    assert evaluated["top1"] == outcome.metrics["top1"]
