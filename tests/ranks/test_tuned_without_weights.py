"""A run that began with somebody's weights goes on from its own checkpoints, though those are gone, or others."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import echelon
from echelon.trainer.start_weights import best_weights
from tests.ranks.run_many import run_many

pytestmark = pytest.mark.timeout(600)
COMMON = ("--threads", "1", "--device", "cpu", "--eval-every", "0")
TRAIN = ("train", "digits", *COMMON, "--model", "small_vit", "--workers", "2", "--epochs", "9")
BASE = ("train", "digits", *COMMON, "--model", "small_vit", "--workers", "1", "--max-steps", "2", "--run", "base")


def test_weights_that_are_gone_are_not_asked_for(tmp_path: Path) -> None:
    settings = {"device": "cpu", "workers": 1, "threads": 1, "eval_every": 0, "epochs": 3}
    echelon.train("mlp", "digits", tmp_path / "base", max_steps=2, **settings)
    tuned = {**settings, "weights": str(tmp_path / "base"), "tune": "head+unfreeze(epoch=2)"}
    echelon.train("mlp", "digits", tmp_path / "through", **tuned)
    echelon.train("mlp", "digits", tmp_path / "stopped", max_steps=5, **tuned)
    shutil.rmtree(tmp_path / "base")
    echelon.resume(tmp_path / "stopped", max_steps=0)
    assert_same(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize(("sync", "tune"), [("ps(mode=sync)", "head"), ("allreduce", "lora(r=2)")])
def test_workers_go_on_from_the_checkpoints_base(tmp_path: Path, sync: str, tune: str) -> None:
    if tune.startswith("lora"):
        pytest.importorskip("peft", reason="needs peft")
    train = [*TRAIN, "--sync", sync, "--tune", tune, "--weights", "base", "--checkpoint-every", "4"]
    results = run_many(tmp_path, [
        [*BASE],
        [*train, "--max-steps", "8", "--run", "through"],
        [*train, "--max-steps", "4", "--run", "stopped"],
        ["resume", "base", "--max-steps", "4"],  # others than it began with
        ["resume", "stopped", "--max-steps", "8"],
    ], deadline_s=500)  # fmt: skip
    assert [r.code for r in results] == [0] * 5, results
    assert_same(tmp_path)


def assert_same(folder: Path) -> None:
    """Compare the newest weights of a run that went through and of one that was stopped, bit by bit."""
    wanted, got = (best_weights(folder / name, "newest") for name in ("through", "stopped"))
    assert wanted.keys() == got.keys()
    assert not [name for name, tensor in wanted.items() if not torch.equal(tensor, got[name])]
