"""What is synchronous repeats bit for bit: a run over a parameter server gives its own weights again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from echelon.run.trained import best_weights
from tests.ranks.run_many import run_many
from tests.ranks.runs import SMALL, losses_of


@pytest.mark.long
def test_a_synchronous_run_repeats_itself_with_a_codec_while_workers_evaluate(tmp_path: Path) -> None:
    """Three workers, so that the order of sums counts; each keeps what the codec left out."""
    command = ["train", "digits", "--model", "mlp", "--workers", "3", "--epochs", "3", "--sync", "ps(mode=sync)",
               "--compression", "topk(0.1)", *SMALL]  # fmt: skip
    results = run_many(tmp_path, [[*command, "--run", name] for name in ("one", "two")])
    assert [r.code for r in results] == [0, 0], results
    losses = losses_of(tmp_path / "one")
    assert len(losses) == 36 and losses == losses_of(tmp_path / "two")
    one, two = best_weights(tmp_path / "one"), best_weights(tmp_path / "two")
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
