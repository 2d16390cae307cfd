"""What is told of a run before torch is imported is what becomes of it."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from torch import nn

from echelon.config import DataConfig, ModelConfig, RunConfig
from echelon.data.base import DataRequest
from echelon.data.sources import SOURCES
from echelon.models.base import ModelInput
from echelon.models.registry import auto_name, build_untried, builtin_names, parameter_count
from echelon.run.foretold import Foretold, declared_count, evaluate, foretell
from echelon.run.start import foretold
from echelon.trainer.assemble import UserObjects

FOLDER = RunConfig(data=DataConfig(source="pictures"))


def _pictures(folder: Path, *sides: int) -> None:
    for name in ("a", "b", "c"):
        (folder / "train" / name).mkdir(parents=True)
        for i, side in enumerate(sides):
            Image.fromarray(np.zeros((side, side + i, 3), dtype=np.uint8)).save(folder / "train" / name / f"{i}.png")


@pytest.mark.parametrize("shape", [(1, 8, 10), (3, 32, 100), (1, 28, 2), (3, 7, 5), (3, 24, 3), (3, 64, 10)])
@pytest.mark.parametrize("name", [name for name in builtin_names() if declared_count(name)])
def test_declared_counts_are_those_of_the_models(name: str, shape: tuple[int, int, int]) -> None:
    channels, side, classes = shape
    model = build_untried(ModelConfig(name=name), ModelInput(classes, channels, side))
    formula = declared_count(name)
    assert evaluate(formula, {"channels": channels, "side": side, "classes": classes}) == parameter_count(model)


def test_digits_are_what_is_declared_of_them() -> None:
    told = foretell(RunConfig())
    assert told == Foretold("small_cnn", 98_026)
    info = SOURCES.settings_class("digits")().open(_request("digits")).info
    assert (info.channels, info.image_size, len(info.classes)) == (1, 8, 10)


def test_a_folder_of_pictures_tells_model_and_parameters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _pictures(tmp_path / "pictures", 24, 20)
    told = foretell(FOLDER)
    info = SOURCES.settings_class("folder")().open(_request("pictures")).info
    data = ModelInput(len(info.classes), info.channels, info.image_size)
    assert told == Foretold(auto_name(data), parameter_count(build_untried(ModelConfig(), data)))


def test_what_only_the_opened_data_tells_is_left_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    _pictures(tmp_path / "pictures", 24, 40)  # on both sides of where another model is taken
    assert foretell(FOLDER) == Foretold("auto")
    assert foretell(replace(RunConfig(), task="regression")) == Foretold("auto")
    tuned = replace(RunConfig(), model=ModelConfig(tune="head"))
    assert foretell(tuned) == Foretold("small_cnn")
    assert foretell(replace(RunConfig(), model=ModelConfig(name="timm/resnet18"))) == Foretold("timm/resnet18")


def test_the_scalars_of_a_module_from_python_are_counted() -> None:
    module = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    module[0].requires_grad_(False)
    own = replace(RunConfig(), model=ModelConfig(name="Sequential"))
    assert foretold(own, UserObjects(model=module)) == Foretold("Sequential", 8, objects=("model",))
    assert foretold(own, UserObjects(model=nn.LazyLinear(2))).parameters is None
    assert foretold(own, UserObjects()) == Foretold("Sequential")
    tuned = replace(own, model=ModelConfig(name="Sequential", tune="head"))
    assert foretold(tuned, UserObjects(model=module)).parameters is None


def test_foretelling_imports_no_torch() -> None:
    code = (
        "import sys; from echelon.config import RunConfig; from echelon.run.start import foretold; "
        "foretold(RunConfig(), None); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=120).returncode == 0


def _request(source: str) -> DataRequest:
    return DataRequest(DataConfig(source=source), seed=0)
