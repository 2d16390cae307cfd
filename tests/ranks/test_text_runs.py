"""Models of transformers through the public API: they train in layouts, or are refused in words."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.ranks.run_many import python_path
from tests.ranks.runs import Runs

TRAINED = ("bert:tp=2", "bert:fsdp=2", "bert:pp=2,microbatches=2", "gpt2:dp=2", "gpt2:tp=2", "gpt2:fsdp=2")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_text_classifiers_train_in_layouts(tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: it is the extra `transformers`")
    program = [sys.executable, "-m", "tests.ranks.own_text", *TRAINED, "gpt2:pp=2"]
    with Runs(tmp_path) as runs:
        run = runs.start(program=program, environment={"PYTHONPATH": python_path()})
        assert run.end(500) == 0, run.text()
        found = [json.loads(line) for line in run.text().splitlines() if line.startswith('["')]
    *trained, refused = found
    assert [f"{each[0]}:{each[1]}" for each in trained] == list(TRAINED)
    assert all(each[2] == "completed" and each[3] > 0.9 for each in trained), trained
    assert "LastToken is not known to be a chain" in refused[2] and "fsdp=N" in refused[2], refused
