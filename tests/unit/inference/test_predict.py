"""Rows that are predicted, and the files that they are written to."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from echelon.config import build
from echelon.data import DataInfo
from echelon.inference.predict import MaskOutput, predict_samples
from echelon.run.trained import TrainedModel
from echelon.tasks.base import TaskSettings, Writing
from echelon.tasks.nest import TensorSpec
from echelon.tasks.segmentation import Segmentation


class Second(nn.Module):
    """Finds the second class in each pixel."""

    def forward(self, images: Tensor) -> Tensor:
        """Return logits `(B, 2, H, W)`."""
        return torch.stack([torch.zeros_like(images[:, 0]), torch.ones_like(images[:, 0])], dim=1)


def test_a_mask_that_is_written_is_not_kept_in_memory(tmp_path: Path) -> None:
    info = DataInfo("pets", ("a", "b"), 3, 8, 4, 4, (1, 1), (0.5,) * 3, (0.2,) * 3, targets=TensorSpec((8, 8), "uint8"))
    task, config = Segmentation().fitted(info, TaskSettings()), build(None, {"data.loaders": 0}).config
    trained = TrainedModel(Second(), info, task, config, tmp_path)
    Image.fromarray(np.zeros((12, 10, 3), np.uint8)).save(tmp_path / "a.png")
    for masks in (MaskOutput.of(tmp_path / "masks"), None):
        [row] = predict_samples(trained, [tmp_path / "a.png"], Writing(), torch.device("cpu"), masks)
        mask = row.prediction.mask if masks is None else np.asarray(Image.open(row.mask_file))
        assert (row.prediction.mask is None) == bool(masks) and mask is not None
        assert mask.shape == (12, 10) and (mask == 1).all()
        assert row.plain() == {"sample": str(tmp_path / "a.png"), "mask": row.mask_file, "shares": {"a": 0.0, "b": 1.0}}
