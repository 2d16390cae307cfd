"""What an export says of itself is enough to use it: how images come into the square, and what the output is."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import TensorDataset
from torchvision.transforms.v2 import functional

from echelon.config import DataConfig, build
from echelon.data import DataInfo, EvalLoader, LoaderConfig, from_datasets
from echelon.data.base import Shard
from echelon.data.decode import open_picture
from echelon.data.masks import Frame
from echelon.inference.export import example_of
from echelon.inference.exports.base import cannot_be_traced, description
from echelon.inference.exports.onnx_file import OnnxFile
from echelon.run.trained import TrainedModel
from echelon.tasks.base import TaskSettings
from echelon.tasks.nest import TensorSpec
from echelon.tasks.segmentation import Segmentation

INFO = DataInfo(
    "shapes", ("beside", "disc"), 3, 32, 9, 9, (60, 30), (0.5, 0.4, 0.3), (0.2,) * 3,
    targets=TensorSpec((32, 32), "int64"), task="segmentation",
)  # fmt: skip


@pytest.fixture
def trained(tmp_path: Path) -> TrainedModel:
    task = Segmentation().fitted(INFO, TaskSettings())
    return TrainedModel(nn.Conv2d(3, 2, 3, padding=1).eval(), INFO, task, build(None, {}).config, tmp_path)


def test_preprocessing_of_a_segmentation_is_repeated_from_what_is_written(
    trained: TrainedModel, tmp_path: Path
) -> None:
    steps = json.loads(description(trained)["preprocessing"])
    assert (steps["place"], steps["interpolation"]) == ("top left", "bilinear, antialiased")
    pixels = np.random.default_rng(0).integers(0, 256, (24, 50, 3), np.uint8)
    Image.fromarray(pixels).save(tmp_path / "image.png")
    side = steps["fit_longer_side"]
    height, width = (round(length * side / 50) for length in (24, 50))
    wanted = torch.tensor(steps["fill"], dtype=torch.uint8)[:, None, None].expand(3, side, side).clone()
    scaled = functional.resize(torch.from_numpy(pixels).permute(2, 0, 1), [height, width], antialias=True)
    wanted[:, :height, :width] = scaled
    picture = open_picture(str(tmp_path / "image.png"))
    square, classes = np.empty((3, side, side), np.uint8), np.zeros((side, side), np.int64)
    square[:] = np.array(steps["fill"], np.uint8)[:, None, None]
    Frame.of(picture, side, None).place(picture.load(1.0), torch.zeros(24, 50, dtype=torch.uint8), square, classes)
    assert torch.equal(torch.from_numpy(square), wanted)


def test_the_output_of_a_model_of_classes_is_called_logits(trained: TrainedModel, tmp_path: Path) -> None:
    OnnxFile().write(trained, tmp_path / "model.onnx", torch.zeros(2, 3, 32, 32))
    assert [each.name for each in onnx.load(tmp_path / "model.onnx").graph.output] == ["logits"]


def test_a_model_is_traced_with_a_sample_that_is_not_skipped() -> None:
    items = TensorDataset(torch.tensor([[torch.nan], [2.0]]), torch.tensor([0, 1]))
    config = LoaderConfig(DataConfig(batch_size=1, loaders=0, on_nan="skip"), 0, torch.device("cpu"))
    assert example_of(EvalLoader(from_datasets(items, items), config, Shard(0, 1))).tolist() == [[2.0], [2.0]]


def test_a_batch_whose_size_is_fixed_is_said_in_words(tmp_path: Path) -> None:
    class Fixed(nn.Module):
        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return inputs.sum(1) if inputs.shape[0] == 2 else inputs.mean(1)

    try:
        torch.export.export(Fixed(), (torch.ones(2, 3),), dynamic_shapes=({0: torch.export.Dim("batch")},))
    except Exception as error:  # noqa: BLE001 - torch has a class of its own for it
        refusal = str(cannot_be_traced(tmp_path / "m.pt2", error))
    assert "torch.export fixes its size of a batch" in refusal and "TORCH_LOGS" not in refusal
