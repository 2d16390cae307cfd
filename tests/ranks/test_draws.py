"""Mixup, CutMix, weighted sampling and own transforms in whole runs: the same losses in every layout, none twice."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import echelon
from echelon.core.errors import UserError
from tests.ranks.run_many import run_many
from tests.ranks.runs import SMALL, losses_of

DRAWS = ("--mixup", "0.4", "--cutmix", "1", "--sample-weights", "inverse-class", "--batch-size", "98")


@pytest.mark.long
def test_a_resumed_run_draws_and_mixes_as_one_that_was_never_stopped(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "mixup": 0.4, "cutmix": 1.0, "sample_weights": "inverse-class", "workers": 1, "threads": 1, "device": "cpu",
        "batch_size": 300, "eval_every": 0, "epochs": 3, "model": "mlp",
    }  # fmt: skip
    whole = echelon.train(run=tmp_path / "whole", transform=lambda image: image.flip(-1), **settings)
    assert whole.status == "completed"
    with pytest.raises(UserError, match="--transform <lambda>: there is no module"):
        echelon.resume(tmp_path / "whole", {"training.epochs": 4})
    name = "tests.ranks.test_draws:mirrored"
    echelon.train(run=tmp_path / "cut", max_steps=7, transform=name, **settings)
    echelon.resume(tmp_path / "cut", {"training.max_steps": 0})
    assert losses_of(tmp_path / "cut") == losses_of(tmp_path / "whole")
    refused = tmp_path / "cut" / "config.yaml"
    refused.write_text(refused.read_text().replace("inverse-class", "none"))
    with pytest.raises(UserError, match="sampling"):
        echelon.resume(tmp_path / "cut", {"training.epochs": 4})
    further = echelon.resume(tmp_path / "whole", {"training.epochs": 4}, transform=mirrored)
    assert further.status == "completed" and len(losses_of(tmp_path / "whole")) == 20


class Shaken(nn.Module):
    """Draws normal numbers of numpy and of Python, of which each makes two at once."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)  # the same start in each run
        self.linear = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        shaken = np.random.randn() + random.gauss(0, 1) if self.training else 0.0
        return self.linear(images.flatten(1)) + shaken * self.linear.bias


def test_a_resume_draws_the_second_normal_of_a_pair(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"workers": 1, "threads": 1, "device": "cpu", "batch_size": 300, "epochs": 3}
    echelon.train(Shaken(), "digits", run=tmp_path / "whole", **settings)
    echelon.train(Shaken(), "digits", run=tmp_path / "cut", max_steps=7, **settings)
    echelon.resume(
        tmp_path / "cut", {"training.max_steps": 0}, model=Shaken(), data="digits"
    )  # the same data: no change
    assert losses_of(tmp_path / "cut") == losses_of(tmp_path / "whole")


def mirrored(image: Tensor) -> Tensor:
    return image.flip(-1)


@pytest.mark.long
def test_losses_do_not_depend_on_the_layout(tmp_path: Path) -> None:
    steps = ("--max-steps", "8", "--lr", "0.05", "--optimizer", "momentum")
    layouts = {"alone": ("dp=1",), "pp": ("pp=2",), "ps": ("dp=2", "--sync", "ps(mode=sync)")}
    train = ["train", "digits", "--model", "mlp", *DRAWS, *SMALL, *steps]
    results = run_many(tmp_path, [[*train, "--run", name, "--parallel", *how] for name, how in layouts.items()])
    assert [result.code for result in results] == [0, 0, 0], results
    losses = {name: losses_of(tmp_path / name) for name in layouts}
    for name, others in losses.items():
        assert list(others) == list(range(1, 9))
        np.testing.assert_allclose(list(others.values()), list(losses["alone"].values()), rtol=2e-3, err_msg=name)
