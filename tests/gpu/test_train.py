"""Whole runs on CUDA devices: every precision learns, a run resumes, two devices agree."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks.run_many import run_many

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def _train(folder: Path, *arguments: str) -> dict[str, Any]:
    command: list[str | Path] = ["train", "digits", "--device", "cuda", *arguments, "--run", folder / "run"]
    (result,) = run_many(folder, [command], deadline_s=150)
    assert result.code == 0, result
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert sum(summary["shares"].values()) > 0.9
    return {"top1": summary["metrics"]["top1"], "shares": summary["shares"]}


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_each_precision_learns(tmp_path: Path, precision: str) -> None:
    assert _train(tmp_path, "--workers", "1", "--precision", precision)["top1"] >= 0.95


def test_a_compiled_model_learns(tmp_path: Path) -> None:
    assert _train(tmp_path, "--workers", "1", "--precision", "bf16", "--compile")["top1"] >= 0.95


def test_a_compiled_model_takes_a_shorter_last_batch(tmp_path: Path) -> None:
    small = ("--model", "timm/resnet18", "--image-size", "32", "--epochs", "1", "--batch-size", "100")
    _train(tmp_path, "--workers", "1", "--precision", "bf16", "--compile", *small)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("compression", ["none", "int8", "topk(density=0.1)", "powersgd(rank=2)"])
def test_two_devices_learn_with_a_codec(tmp_path: Path, compression: str) -> None:
    assert _train(tmp_path, "--workers", "2", "--compression", compression)["top1"] >= 0.95
