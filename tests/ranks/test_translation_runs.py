"""Translation, trained by commands: the same function in every layout, a run that resumes, what the report shows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.ranks.run_many import run_many
from tests.ranks.runs import losses_of
from tests.unit.data.test_parallel_text import make_parallel

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
COMMON = ("--input", "en", "--target", "de", "--tokeniser", "bpe(300)", "--threads", "1", "--device", "cpu",
          "--batch-size", "12", "--epochs", "1", "--checkpoint-every", "3", "--eval-every", "0")  # fmt: skip


def test_pairs_train_the_same_in_every_layout_and_after_a_resume(tmp_path: Path) -> None:
    make_parallel(tmp_path / "pairs", {"train": 72, "val": 7, "test": 5})
    train, whole, part = ("train", "pairs", *COMMON), ("--max-steps", "6"), ("--max-steps", "3")
    layouts = ("dp=2", "fsdp=2", "tp=2")
    commands = [
        [*train, *whole, "--workers", "1", "--run", "alone"],
        *([*train, *whole, "--workers", "2", "--parallel", layout, "--run", layout] for layout in layouts),
        [*train, *part, "--workers", "2", "--run", "half"],
        ["resume", "half", *whole],
        ["evaluate", "half", "--json"],
        [*train, *whole, "--workers", "2", "--parallel", "pp=2", "--run", "refused"],
    ]
    results = run_many(tmp_path, commands, deadline_s=500)
    assert [r.code for r in results] == [0] * 7 + [2], results
    alone, metrics = losses_of(tmp_path / "alone"), summary(tmp_path / "alone")
    assert len(alone) == 6 and alone[6] < alone[1] and set(metrics) == {"chrf", "bleu", "loss", "perplexity"}
    for layout in layouts:
        assert losses_of(tmp_path / layout) == pytest.approx(alone, rel=1e-4), layout
        assert summary(tmp_path / layout) == pytest.approx(metrics, rel=1e-3), layout
    assert losses_of(tmp_path / "half") == losses_of(tmp_path / "dp=2"), "to the bit"
    assert json.loads(results[6].out)["loss"] == pytest.approx(metrics["loss"], rel=1e-3)
    assert "is not known to be a chain of blocks" in results[7].err and "fsdp=N" in results[7].err
    check_translations(tmp_path / "dp=2")


def summary(folder: Path) -> dict[str, float]:
    metrics: dict[str, float] = json.loads((folder / "summary.json").read_text())["metrics"]
    return metrics


def check_translations(folder: Path) -> None:
    """Check that the report shows translations beside their references, and that the run keeps its tokeniser."""
    sections = json.loads((folder / "evaluation.json").read_text())["sections"]
    (shown,) = [section for section in sections if section["title"] == "Translations beside their references"]
    assert shown["texts"][0]["text"].startswith("reference:  ") and "\ntranslated: " in shown["texts"][0]["text"]
    assert "Translations beside their references" in (folder / "report.html").read_text()
    assert (folder / "tokeniser.json").is_file()
