"""Whole runs that train more from an epoch on: stopped before, where and after it begins, they are the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import echelon
from echelon.checkpoint import CheckpointStore, whole
from echelon.config.schema import ModelConfig
from echelon.core.state_tree import StateView
from echelon.models import ModelInput, build_model
from tests.ranks.run_many import run_many
from tests.ranks.runs import read_lines

pytestmark = pytest.mark.timeout(900)
TUNE = 'head+unfreeze(epoch=2, pattern="norm+blocks.3")+unfreeze(epoch=3)'
COMMON = ("--threads", "1", "--device", "cpu", "--epochs", "3", "--batch-size", "500", "--model", "small_vit",
          "--lr", "0.02", "--optimizer", "adamw", "--ema", "0.9", "--eval-every", "0", "--checkpoint-every", "100",
          "--keep-checkpoints", "20", "--tune", TUNE)  # fmt: skip
CHOICES = {
    "dp": ("--parallel", "dp=2"),
    "fsdp": ("--parallel", "fsdp=2"),
    "tp": ("--parallel", "tp=2"),
    "pp": ("--parallel", "pp=2,microbatches=2"),
    "local": ("--parallel", "dp=2", "--sync", "local(period=3, warmup=0)"),
    "diloco": ("--parallel", "dp=2", "--sync", "diloco(period=3, warmup=0)"),
    "codec": ("--parallel", "dp=2", "--compression", "int8"),
    "servers": ("--workers", "2", "--sync", "ps(mode=sync, servers=2)"),
    "async": ("--workers", "1", "--sync", "ps(mode=async)"),
}


AVERAGING = ("local", "diloco")  # replicas agree after the last step of a run, however long it was to be


def newest(folder: Path) -> StateView:
    found = CheckpointStore(folder / "checkpoints", keep=1).newest()
    assert found is not None and found[0] == 9
    state: StateView = whole(found[1])
    return state


def check(tmp_path: Path, choice: str) -> None:
    train = ["train", "digits", *COMMON, *CHOICES[choice]]
    commands = [
        [*train, "--run", "through"],
        [*train, "--run", "stopped", "--max-steps", "3"],
        ["resume", "stopped", "--max-steps", "6" if choice in AVERAGING else "5"],
        ["resume", "stopped", "--max-steps", "9"],
    ]
    results = run_many(tmp_path, commands, deadline_s=400)
    assert [result.code for result in results] == [0] * 4, results
    through, stopped = newest(tmp_path / "through"), newest(tmp_path / "stopped")
    for kind in ("model", "average"):
        tensors = [state["ema"]["average"] if kind == "average" else state["model"] for state in (through, stopped)]
        assert tensors[0].keys() == tensors[1].keys()
        for name, tensor in tensors[0].items():
            assert torch.equal(tensor, tensors[1][name]), f"{choice}: {kind} of {name}"
    said = [line["message"] for line in read_lines(tmp_path / "through") if line.get("name") == "tuning"]
    assert [text.split(":")[0] for text in said[1:]] == ["epoch 2", "epoch 3"] and "begin anew" in said[1]
    sizes = list((tmp_path / "through" / "checkpoints").glob("base-*"))
    assert len(sizes) == 1, "what is frozen later was in the first base"


@pytest.mark.slow  # `tests/laws/test_frozen_checkpoints.py` resumes such trainings, without commands
@pytest.mark.parametrize("choice", CHOICES)
def test_a_run_that_unfreezes_resumes_to_the_bit(tmp_path: Path, choice: str) -> None:
    check(tmp_path, choice)


@pytest.mark.long
def test_a_model_from_python_unfreezes_as_one_that_is_named(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = build_model(ModelConfig(name="small_vit"), ModelInput(10, 1, 8))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    save_file(before, tmp_path / "start.safetensors")
    known: dict[str, Any] = {"workers": 1, "device": "cpu", "epochs": 3, "batch_size": 500, "tune": TUNE, "lr": 0.1}
    own = echelon.train(model, "digits", run=tmp_path / "own", **known)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    named = echelon.train(
        "small_vit", "digits", run=tmp_path / "named", weights=str(tmp_path / "start.safetensors"), **known
    )
    models = [newest(outcome.folder)["model"] for outcome in (own, named)]
    assert models[0].keys() == models[1].keys()
    assert all(torch.equal(tensor, models[1][name]) for name, tensor in models[0].items())
    assert not any(torch.equal(tensor, before[name]) for name, tensor in models[0].items() if tensor.ndim > 1)
    said = [line["message"] for line in read_lines(own.folder) if line.get("name") == "tuning"]
    assert [text.split(":")[0] for text in said[1:]] == ["epoch 2", "epoch 3"]
