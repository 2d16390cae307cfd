"""A run whose modules were replaced by a function of its user: used, and started from, by commands."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from torch import Tensor

from echelon.checkpoint import CheckpointStore, whole
from tests.ranks.run_many import run_many
from tests.ranks.runs import read_lines

CODE = """
import torch
from torch import nn

class Scaled(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.scale = inner, nn.Parameter(torch.ones(1))

    def forward(self, x):
        return self.inner(x) * self.scale

def scaled(old):
    return Scaled(old)
"""
REPLACE = 'replace("blocks.*.mlp", scaled_parts:scaled)'
TRAIN = ("train", "digits", "--model", "small_vit", "--workers", "1", "--threads", "1", "--device", "cpu",
         "--max-steps", "2", "--batch-size", "500")  # fmt: skip


@pytest.mark.long
@pytest.mark.timeout(400)
def test_commands_use_a_run_with_modules_of_its_user(tmp_path: Path) -> None:
    (tmp_path / "scaled_parts.py").write_text(CODE)
    weights = ("--weights", "first", "--lr", "1e-12", "--max-steps", "1")
    results = run_many(
        tmp_path,
        [
            [*TRAIN, "--tune", REPLACE, "--run", "first"],
            ["evaluate", "first"],
            [*TRAIN, *weights, "--run", "without"],
            [*TRAIN, *weights, "--tune", f"head+{REPLACE}", "--run", "again"],
        ],
        deadline_s=300,
    )
    assert [result.code for result in results] == [0, 0, 2, 0], results
    assert REPLACE.replace(", scaled_parts:scaled", ', "scaled_parts:scaled"') in results[2].err
    (loaded,) = [line for line in read_lines(tmp_path / "again") if line.get("name") == "weights_loaded"]
    assert not loaded["new"] and not loaded["unexpected"]
    models = [newest_model(tmp_path / name) for name in ("first", "again")]
    scales = [{name: value for name, value in model.items() if name.endswith(".scale")} for model in models]
    assert len(scales[0]) == 4
    assert all(abs(float(scales[1][name] - value)) < 1e-6 != float(value) for name, value in scales[0].items())


def newest_model(folder: Path) -> Mapping[str, Tensor]:
    """Return the weights of a run's newest checkpoint."""
    found = CheckpointStore(folder / "checkpoints", keep=1).newest()
    assert found is not None
    model: Mapping[str, Tensor] = whole(found[1])["model"]
    return model
