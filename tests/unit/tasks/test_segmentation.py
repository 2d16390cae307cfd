"""The task of a class for each pixel: its loss, metrics and what its report shows."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from sklearn.metrics import f1_score, jaccard_score

from echelon.config.schema import ModelConfig
from echelon.core.errors import UserError
from echelon.data.base import DataInfo
from echelon.models import build_model, parameter_count
from echelon.models.families import hints_for
from echelon.parallel.pipeline.find_chain import find_chain
from echelon.tasks.base import TaskSettings
from echelon.tasks.nest import TensorSpec
from echelon.tasks.segmentation import Segmentation, class_colours
from echelon.trainer.inputs import model_input

NAMES = ("beside", "disc", "square")
INFO = DataInfo(
    "shapes", NAMES, 3, 32, 9, 9, (60, 30, 10), (0.5,) * 3, (0.2,) * 3,
    targets=TensorSpec((32, 32), "int64"), task="segmentation",
)  # fmt: skip


def task(**settings: Any) -> Segmentation:
    return Segmentation().fitted(INFO, TaskSettings(**settings))


def batch(samples: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(samples, 3, 32, 32, generator=draw)
    targets = torch.randint(0, 3, (samples, 32, 32), generator=draw)
    targets[0, :16], targets[1] = -100, -100
    return logits, targets


def test_the_loss_is_the_sum_over_pixels_that_count() -> None:
    logits, targets = batch()
    valid = targets != -100
    wanted = F.cross_entropy(logits.movedim(1, -1)[valid], targets[valid], reduction="sum")
    assert task().units(targets) == int(valid.sum())
    torch.testing.assert_close(task().loss_sum(logits, targets), wanted)
    in_files = targets.masked_fill(~valid, 255).to(torch.uint8)
    assert task().units(in_files) == int(valid.sum())
    torch.testing.assert_close(task().loss_sum(logits, in_files), wanted)
    torch.testing.assert_close(task().loss_sum({"out": logits, "aux": logits}, targets), 1.5 * wanted)


def test_nothing_that_counts_gives_a_loss_and_a_gradient_of_zero() -> None:
    logits = torch.randn(2, 3, 32, 32, requires_grad=True)
    loss = task().loss_sum(logits, torch.full((2, 32, 32), -100))
    loss.backward()  # type: ignore[no-untyped-call]
    assert not loss and logits.grad is not None and not logits.grad.any()


def test_balanced_weights_are_of_pixels() -> None:
    logits, targets = batch()
    weights = torch.tensor([100 / 180, 100 / 90, 100 / 30])
    wanted = F.cross_entropy(logits, targets, weights, reduction="sum")
    weighted = task(class_weights="balanced", label_smoothing=0.1)
    torch.testing.assert_close(task(class_weights="balanced").loss_sum(logits, targets), wanted)
    plain = F.cross_entropy(logits, targets, reduction="sum")
    torch.testing.assert_close(weighted.for_evaluation().loss_sum(logits, targets), plain)


def test_metrics_are_those_of_scikit_learn() -> None:
    logits, targets = batch()
    logits[:, 2] = -9  # never predicted
    metrics = task().metrics(torch.device("cpu"))
    metrics.update(logits[:3], targets[:3])
    metrics.update({"out": logits[3:]}, targets[3:])
    metrics.update(logits[:0], targets[:0])
    result = metrics.compute()
    valid = targets != -100
    true, predicted = targets[valid].numpy(), logits.argmax(1)[valid].numpy()
    assert result.metrics["miou"] == pytest.approx(jaccard_score(true, predicted, average="macro"))
    assert result.metrics["dice"] == pytest.approx(f1_score(true, predicted, average="macro"))
    assert result.metrics["pixel_accuracy"] == pytest.approx((true == predicted).mean())
    assert result.detail["iou"] == pytest.approx(jaccard_score(true, predicted, average=None).tolist())
    (section,) = task().report_sections(result)
    assert [row[0] for row in section.tables[0].rows] == list(NAMES) and section.tables[0].rows[2][1] == "0.000"


def test_classes_that_are_nowhere_count_for_nothing() -> None:
    metrics = task().metrics(torch.device("cpu"))
    assert metrics.compute().metrics["miou"] is None
    logits = torch.zeros(1, 3, 32, 32)
    logits[:, 1] = 1
    metrics.update(logits, torch.ones(1, 32, 32, dtype=torch.int64))
    result = metrics.compute()
    assert result.metrics["miou"] == 1 and result.detail["iou"] == [None, 1.0, None]
    assert task().report_sections(result)[0].tables[0].rows[0][1:] == ["-", "-", "0.0%"]


def test_the_worst_images_are_shown_beside_mask_and_prediction() -> None:
    logits, targets = batch()
    targets[2] = 1
    logits[2, 0] = 20  # all wrong
    chosen = task(worst_samples=2).examples()
    assert chosen is not None
    chosen.update(torch.zeros(4, 3, 32, 32), logits, targets, 10, True)
    section = chosen.section().result()
    assert section is not None and len(section.pictures) == 2
    first = section.pictures[0]
    assert first.wide and first.lines[0].startswith("mIoU 0.00, 0.0%") and "sample 12 of the eval" in first.lines[1]
    shown = np.asarray(Image.open(io.BytesIO(base64.b64decode(first.source.partition(",")[2]))))
    assert shown.shape == (32, 3 * 32 + 2 * 4, 3)
    middles = [shown[16, 16], shown[16, 36 + 16], shown[16, 72 + 16]]
    wanted = [(128, 128, 128), class_colours(3)[1], class_colours(3)[0]]
    assert all(np.abs(a.astype(int) - b).max() < 12 for a, b in zip(middles, wanted, strict=True))
    assert "black is beside, orange is disc" in section.notes[0]
    assert len(set(class_colours(60).values())) == 60


def test_targets_and_outputs_that_do_not_fit_are_refused() -> None:
    of_classes = DataInfo("digits", NAMES, 3, 32, 9, 9, (3, 3, 3))
    with pytest.raises(UserError, match=r"needs the class of each pixel: give a folder with images/ and masks/"):
        Segmentation().fitted(of_classes, TaskSettings())
    nameless = DataInfo("own", (), 3, 32, 9, 9, (), targets=TensorSpec((32, 32), "int64"))
    with pytest.raises(UserError, match=r"give task=Segmentation\(classes="):
        Segmentation().fitted(nameless, TaskSettings())
    assert Segmentation(NAMES).fitted(nameless, TaskSettings()).outputs == 3
    with pytest.raises(UserError, match=r"must return logits of shape \(batch, 3, 32, 32\).* as small_unet"):
        build_model(ModelConfig("resnet20"), model_input(INFO, task()))


def test_the_small_unet_fits_any_size() -> None:
    model = build_model(ModelConfig("auto"), model_input(INFO, task()))
    assert type(model).__name__ == "SmallUNet" and 0.4e6 < parameter_count(model) < 0.6e6
    for size in ((8, 8), (37, 50)):
        assert model(torch.zeros(2, 3, *size)).shape == (2, 3, *size)
    model(torch.zeros(0, 3, 32, 32)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    with pytest.raises(UserError, match=r"SmallUNet is not known to be a chain.* or use fsdp=N instead"):
        find_chain(model, hints_for(model))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fcn_resnet50", "lraspp_mobilenet_v3_large"])
def test_torchvisions_models_of_segmentation_are_taken(name: str) -> None:
    model = build_model(ModelConfig(f"torchvision/{name}"), model_input(INFO, task()))
    outputs = model.train()(torch.zeros(2, 3, 32, 32))
    assert outputs["out"].shape == (2, 3, 32, 32) and ("aux" in outputs) == name.startswith("fcn")
    task().loss_sum(outputs, torch.zeros(2, 32, 32, dtype=torch.int64)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
