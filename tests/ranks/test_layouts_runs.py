"""Whole runs in layouts, from the command line: they train, resume in another layout, export, and refuse in words."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.ranks.run_many import run_many
from tests.ranks.runs import losses_of

pytestmark = pytest.mark.timeout(600)
COMMON = ("--threads", "1", "--device", "cpu", "--epochs", "1", "--batch-size", "100", "--model", "small_vit",
          "--lr", "0.02")  # fmt: skip


@pytest.mark.long
def test_a_run_in_layouts_is_the_same_run_and_resumes_in_another(tmp_path: Path) -> None:
    steps = ("--max-steps", "4", "--eval-every", "0", "--checkpoint-every", "4", "--class-weights", "balanced",
             "--clip-norm", "1.0", "--accumulate", "2", "--ema", "0.9", "--label-smoothing", "0.1")  # fmt: skip
    commands = [
        ["train", "digits", *COMMON, *steps, "--workers", "1", "--run", "one"],
        ["train", "digits", *COMMON, *steps, "--parallel", "dp=1,tp=2,pp=2", "--run", "four"],
        ["resume", "four", "--parallel", "fsdp=2", "--max-steps", "8"],
        ["resume", "one", "--max-steps", "8"],
        ["evaluate", "four"],
        ["evaluate", "one"],
        ["export", "four", "weights.safetensors"],
        ["train", "digits", *COMMON, "--parallel", "tp=3", "--run", "refused"],
        ["train", "digits", *COMMON, "--parallel", "pp=8", "--batch-size", "8", "--run", "refused8"],
        ["train", "digits", *COMMON, "--parallel", "fsdp=2,tp=2,pp=2", "--dry-run"],
    ]
    results = run_many(tmp_path, commands)
    assert [r.code for r in results] == [0] * 7 + [2] * 2 + [0], results
    assert losses_of(tmp_path / "four") == pytest.approx(losses_of(tmp_path / "one"), rel=1e-4)
    whole, split = (json.loads((tmp_path / name / "evaluation.json").read_text()) for name in ("one", "four"))
    assert split["confusion"] == whole["confusion"], "of class weights, clipping, an average of weights: the same model"
    assert "blocks.0.attn.qkv.weight" in load_file(tmp_path / "weights.safetensors")
    assert "3" in results[7].err and "heads" in results[7].err, results[7].err
    assert "blocks" in results[8].err, results[8].err
    assert "stage 1: " in results[9].out and "predicted memory per rank of pipeline rank 1" in results[9].out


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        ("dp=2,zero1", ("--momentum", "0")),
        ("dp=2,zero1", ("--optimizer", "adagrad")),
        ("dp=2,zero1", ("--compression", "topk(0.1, warmup_steps=0, finish_steps=0)")),
        ("fsdp=4", ("--momentum", "0", "--tune", "head", "--clip-norm", "1.0")),
        ("pp=2,microbatches=2", ("--optimizer", "adamw")),
    ],
)
def test_a_resume_goes_on_as_if_nothing_had_stopped_it(tmp_path: Path, layout: str, settings: tuple[str, ...]) -> None:
    train = ["train", "digits", *COMMON, "--eval-every", "0", "--elastic", "off", "--parallel", layout, *settings]
    commands = [
        [*train, "--max-steps", "8", "--run", "whole"],
        [*train, "--max-steps", "4", "--run", "cut"],
        ["resume", "cut", "--max-steps", "8"],
    ]
    results = run_many(tmp_path, commands)
    assert [r.code for r in results] == [0] * 3, results
    assert losses_of(tmp_path / "cut") == losses_of(tmp_path / "whole")


@pytest.mark.slow
def test_eight_ranks_on_all_axes_and_split_replicas_that_average(tmp_path: Path) -> None:
    commands = [
        ["train", "digits", *COMMON, "--workers", "1", "--run", "one"],
        ["train", "digits", *COMMON, "--parallel", "dp=2,tp=2,pp=2", "--run", "eight"],
        ["train", "digits", *COMMON, "--parallel", "tp=2", "--workers", "4", "--sync", "local(8)",
         "--compression", "int8", "--run", "local"],
        ["train", "digits", *COMMON, "--parallel", "dp=2,fsdp=2", "--compression", "powersgd(2)", "--ema", "0.9",
         "--clip-norm", "1.0", "--accumulate", "2", "--class-weights", "balanced", "--run", "codec"],
    ]  # fmt: skip
    results = run_many(tmp_path, commands, deadline_s=500)
    assert [r.code for r in results] == [0] * len(commands), results
    one = losses_of(tmp_path / "one")
    assert losses_of(tmp_path / "eight") == pytest.approx(one, rel=1e-3)
    for name in ("local", "codec"):
        assert list(losses_of(tmp_path / name)) == list(one)
