"""Mixup, CutMix, weighted sampling and own transforms in whole runs: the same losses in every layout, none twice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import Tensor

import echelon
from echelon.core.errors import UserError
from tests.ranks.runs import SMALL, Runs, losses_of

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


def mirrored(image: Tensor) -> Tensor:
    return image.flip(-1)


@pytest.mark.long
def test_losses_do_not_depend_on_the_layout(tmp_path: Path) -> None:
    with Runs(tmp_path) as runs:
        losses = {}
        for name, layout in {"alone": "dp=1", "pp": "pp=2", "ps": "dp=2"}.items():
            sync = ("--sync", "ps(mode=sync)") if name == "ps" else ()
            run = runs.start("train", "digits", "--model", "mlp", *DRAWS, *SMALL, "--parallel", layout, *sync,
                             "--max-steps", "8", "--lr", "0.05", "--optimizer", "momentum", folder=name)  # fmt: skip
            assert run.end() == 0, run.text()
            losses[name] = run.losses()
        for name, others in losses.items():
            assert list(others) == list(range(1, 9))
            np.testing.assert_allclose(list(others.values()), list(losses["alone"].values()), rtol=2e-3, err_msg=name)
