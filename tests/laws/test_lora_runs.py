"""A run that trains adapters is used as any other: evaluated, predicted with, tuned on, and exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from echelon import api
from echelon.config import build
from echelon.core.errors import UserError
from echelon.models import ModelInput, build_model
from echelon.run.defaults import with_task_defaults
from echelon.run.in_process import start_in_process
from echelon.run.resolve import launch_request
from tests.laws.extras import NEEDS_PEFT

pytestmark = [NEEDS_PEFT, pytest.mark.long, pytest.mark.timeout(600)]
SETTINGS = {
    "data.source": "digits",
    "model.name": "small_vit",
    "training.max_steps": 3,
    "launch.workers": 1,
    "training.device": "cpu",
    "optimizer.lr": 0.5,
}


def train(folder: Path, **settings: Any) -> Path:
    config = with_task_defaults(build(None, {**SETTINGS, "run": str(folder), **settings}), None, True).config
    assert start_in_process(launch_request(config), None).status in ("completed", "stopped")
    return folder


def digits(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 255, (count, 1, 8, 8)).astype(np.uint8)


def small_vit(weights: Path) -> nn.Module:
    config = build(None, SETTINGS).config
    model = build_model(config.model, ModelInput(10, 1, 8))
    model.load_state_dict(load_file(weights))
    return model.eval()


def wrapped(old: nn.Module) -> nn.Module:
    return nn.Sequential(old, nn.Linear(64, 64))


def test_a_run_with_adapters_is_used_as_any_other(tmp_path: Path) -> None:
    import peft

    base = train(tmp_path / "base")
    run = train(tmp_path / "tuned", **{"model.weights": str(base), "model.tune": "lora(r=4)+norm+bias"})
    api.export(base, tmp_path / "base.safetensors")
    api.export(run, tmp_path / "tuned.safetensors")
    api.export(run, tmp_path / "tuned.peft")
    merged, inputs = small_vit(tmp_path / "tuned.safetensors"), torch.randn(4, 1, 8, 8)
    with torch.no_grad():
        expected = merged(inputs)
        start = small_vit(tmp_path / "base.safetensors")
        assert not torch.allclose(start(inputs), expected, atol=1e-2)
        loaded = peft.PeftModel.from_pretrained(start, str(tmp_path / "tuned.peft")).eval()
        assert torch.allclose(loaded(inputs), expected, atol=1e-5)
    rows = api.predict(run, digits(3), device="cpu")
    again = train(tmp_path / "again", **{"model.weights": str(run), "model.tune": "lora(r=2)", "optimizer.lr": 1e-9})
    for row, other in zip(rows, api.predict(again, digits(3), device="cpu"), strict=True):
        assert row.prediction.probability == pytest.approx(other.prediction.probability, abs=1e-4)
    with pytest.raises(UserError, match="the run has no adapters"):
        api.export(base, tmp_path / "base.peft")


def test_what_peft_has_no_place_for_is_refused(tmp_path: Path) -> None:
    run = train(tmp_path / "tuned", **{"model.tune": "lora(r=4)+last(1)"})
    with pytest.raises(UserError, match=r"blocks.*was trained beside the adapters, and peft has no place for it"):
        api.export(run, tmp_path / "tuned.peft")
    assert not (tmp_path / "tuned.peft").exists()


def test_what_was_unfrozen_beside_adapters_is_exported_with_them(tmp_path: Path) -> None:
    later = {"training.max_steps": 0, "training.epochs": 2, "data.batch_size": 500, "training.eval_every": 0}
    tune = 'lora(r=4)+unfreeze(epoch=2, pattern="blocks.*.norm*+norm")'
    run = train(tmp_path / "tuned", **later, **{"model.tune": tune})
    api.export(run, tmp_path / "tuned.safetensors")
    api.export(run, tmp_path / "tuned.peft")
    assert any("norm" in name for name in load_file(tmp_path / "tuned.peft" / "adapter_model.safetensors"))
    run = train(tmp_path / "whole", **later, **{"model.tune": "lora(r=4)+unfreeze(epoch=2)"})
    with pytest.raises(UserError, match="was trained beside the adapters, and peft has no place for it"):
        api.export(run, tmp_path / "whole.peft")


def test_statistics_that_were_trained_beside_adapters_are_exported_with_them(tmp_path: Path) -> None:
    import peft

    resnet = {"model.name": "resnet20"}
    base = train(tmp_path / "base", **resnet)
    tuned = {"model.weights": str(base), "model.tune": "lora(r=4)", "model.frozen_norm": "train"}
    run = train(tmp_path / "tuned", **resnet, **tuned)
    models = []
    for folder, name in ((run, "tuned.safetensors"), (base, "base.safetensors")):
        api.export(folder, tmp_path / name)
        model = build_model(build(None, {**SETTINGS, **resnet}).config.model, ModelInput(10, 1, 8))
        model.load_state_dict(load_file(tmp_path / name))
        models.append(model.eval())
    api.export(run, tmp_path / "tuned.peft")
    inputs = torch.randn(4, 1, 8, 8)
    loaded = peft.PeftModel.from_pretrained(models[1], str(tmp_path / "tuned.peft")).eval()
    with torch.no_grad():
        assert torch.allclose(loaded(inputs), models[0](inputs), rtol=1e-4, atol=1e-4)


def test_adapters_of_a_model_with_other_modules_are_refused(tmp_path: Path) -> None:
    tune = f'lora(r=4)+replace("blocks.0.norm1", {__name__}:wrapped)'
    run = train(tmp_path / "tuned", **{"model.tune": tune})
    with pytest.raises(UserError, match="--tune replace has put other modules into it"):
        api.export(run, tmp_path / "tuned.peft", trust=True)
