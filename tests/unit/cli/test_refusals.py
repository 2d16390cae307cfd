"""A misspelt choice is refused at once: no torch is imported, and nothing is left behind."""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path

import pytest

LONGEST_S = 0.5  # of the processor's time, for the same reason on a busy machine
REFUSED = [
    ("--sync", "allreduc", "did you mean allreduce?"),
    ("--sync", "local(8, ovrlap=2)", "did you mean overlap?"),
    ("--sync", "ps(mod=async)", "did you mean mode?"),
    ("--compression", "topk(densty=0.1)", "did you mean density?"),
    ("--compression", "int8+hufman", "did you mean huffman?"),
    ("--collective", "hierarchical(grup=2)", "did you mean group?"),
    ("--parallel", "dp=2,tpp=2", "did you mean tp?"),
    ("--task", "image-clasification", "did you mean image-classification?"),
    ("--task", "regresion", "known: auto"),
    ("--on", "locl", "did you mean local?"),
    ("--on", "slrm", "known: local"),
]


def _train(folder: Path, *options: str) -> tuple[subprocess.CompletedProcess[str], float]:
    """Run `echelon train digits`; returns how it went, with its imports, and the seconds that it computed."""
    command = [sys.executable, "-X", "importtime", "-m", "echelon", "train", "digits", *options]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return done, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


@pytest.mark.parametrize(("flag", "spec", "words"), REFUSED)
def test_a_misspelt_choice_is_refused_without_torch(flag: str, spec: str, words: str, tmp_path: Path) -> None:
    done, _ = _train(tmp_path, flag, spec)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    said = [line for line in done.stderr.splitlines() if not line.startswith("import time:")]
    assert done.returncode == 2 and len(said) == 1, said
    assert flag in said[0] and words in said[0]
    assert not imported & {"torch", "numpy", "timm"}
    assert not list(tmp_path.iterdir())


def test_a_misspelt_choice_is_refused_in_half_a_second(tmp_path: Path) -> None:
    """The least of a few: what else the machine does makes the same work take longer."""
    assert min(_train(tmp_path, "--sync", "allreduc")[1] for _ in range(5)) < LONGEST_S
