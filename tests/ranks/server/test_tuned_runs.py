"""Runs with a parameter server that train a part of a model: servers hold it alone, and runs resume to the bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from echelon.trainer.start_weights import best_weights
from tests.ranks.run_many import run_many

pytestmark = pytest.mark.timeout(600)
COMMON = ("--threads", "1", "--device", "cpu", "--eval-every", "0")
TRAIN = ("train", "digits", *COMMON, "--model", "small_vit", "--workers", "2")
SERVED = ("--sync", "ps(mode=sync)", "--epochs", "9", "--checkpoint-every", "4")


@pytest.mark.slow
@pytest.mark.parametrize("tune", ["lora(r=2)", "head", "layer_decay(0.5)"])
def test_a_part_is_served_and_resumed_to_the_bit(tmp_path: Path, tune: str) -> None:
    if tune.startswith("lora"):
        pytest.importorskip("peft", reason="needs peft")
    train = [*TRAIN, *SERVED, "--tune", tune]
    results = run_many(tmp_path, [
        [*train, "--max-steps", "8", "--run", "through"],
        [*train, "--max-steps", "4", "--run", "stopped"],
        ["resume", "stopped", "--max-steps", "8"],
    ], deadline_s=500)  # fmt: skip
    assert [r.code for r in results] == [0] * 3, results
    wanted, got = (best_weights(tmp_path / name, "newest") for name in ("through", "stopped"))
    assert wanted.keys() == got.keys()
    assert not [name for name, tensor in wanted.items() if not torch.equal(tensor, got[name])]


@pytest.mark.slow
@pytest.mark.parametrize("tune", ["layer_decay(0.5)", "head"])
def test_servers_know_the_rates_of_layers(tmp_path: Path, tune: str) -> None:
    train = [*TRAIN, "--tune", tune, "--max-steps", "4", "--schedule", "constant"]
    results = run_many(tmp_path, [
        [*train, "--sync", "allreduce", "--run", "allreduce"],
        [*train, "--sync", "ps(mode=sync)", "--run", "served"],
        [*train, "--sync", "ps(mode=sync)", "--tune", "all", "--run", "other"],
    ], deadline_s=500)  # fmt: skip
    assert [r.code for r in results] == [0] * 3, results
    one, served, other = (best_weights(tmp_path / name, "newest") for name in ("allreduce", "served", "other"))
    assert max(float((one[name] - served[name]).abs().max()) for name in one) < 1e-5
    assert max(float((one[name] - other[name]).abs().max()) for name in one) > 1e-3
