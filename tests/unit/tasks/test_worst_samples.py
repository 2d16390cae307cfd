from __future__ import annotations

import base64
import io

import numpy as np
import pytest
import torch
from PIL import Image

from echelon.core.figure import ReportSection
from echelon.data.base import DataInfo
from echelon.tasks.base import Examples, TaskSettings
from echelon.tasks.image_classification import ImageClassification
from echelon.tasks.nest import TensorSpec
from echelon.tasks.worst_samples import Pixels, WorstSamples, data_uri

NAMES = ("cat", "dog", "<b>")


def choice(limit: int = 3, **facts: object) -> Examples | None:
    info = DataInfo("any", NAMES, 3, 8, 9, 9, (3, 3, 3), **facts)  # type: ignore[arg-type]
    return ImageClassification().fitted(info, TaskSettings(worst_samples=limit)).examples()


def section(choice: Examples | None) -> ReportSection:
    assert choice is not None
    made = choice.section().result()
    assert made is not None
    return made


def pixels(source: str) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2]))))


def test_the_worst_are_those_of_the_highest_loss_and_the_earlier_of_equal_ones() -> None:
    worst = choice()
    assert worst is not None
    # Class 0 is true of all; the second logit is how wrong the model is.
    wrong = [0.0, 5.0, 5.0, -1.0, 9.0, 5.0, 0.5]
    for first in (4, 0):  # batches come in any order
        part = wrong[first : first + 4]
        logits = torch.tensor([[0.0, value, -50.0] for value in part])
        worst.update(torch.zeros(len(part), 3, 8, 8), logits, torch.zeros(len(part), dtype=torch.int64), first, True)
    lines = [picture.lines for picture in section(worst).pictures]
    told = ["loss 9, sample 4", "loss 5.01, sample 1", "loss 5.01, sample 2"]
    assert [line[-1] for line in lines] == [f"{words} of the evaluation data" for words in told]
    assert lines[0][:2] == ("true cat, predicted dog", "dog: 100.0%, cat: 0.0%")


def test_losses_without_a_number_are_the_highest_and_empty_batches_change_nothing() -> None:
    worst = choice(1)
    assert worst is not None
    worst.update(torch.zeros(0, 3, 8, 8), torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64), 0, True)
    assert worst.section().result() is None
    logits = torch.tensor([[0.0, 99.0, 0.0], [torch.nan, 0.0, 0.0]])
    worst.update(torch.zeros(2, 3, 8, 8), logits, torch.zeros(2, dtype=torch.int64), 0, False)
    assert [picture.lines[-1] for picture in section(worst).pictures] == ["loss inf"]


@pytest.mark.parametrize("facts", [{"shape": (10,)}, {"shape": (4, 8, 8)}, {"several": (TensorSpec((3, 8, 8)),)}])
def test_inputs_that_are_no_images_have_no_pictures(facts: dict[str, object]) -> None:
    assert choice(**facts) is None
    assert choice(0) is None


def test_a_picture_is_the_image_before_it_was_normalised() -> None:
    image = torch.arange(3 * 64, dtype=torch.uint8).reshape(1, 3, 8, 8)
    mean, std = (0.4, 0.5, 0.6), (0.1, 0.2, 0.3)
    normalised = (image / 255 - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    shown = Pixels((3, 8, 8), mean, std).thumbnails(normalised)[0].numpy()
    assert np.array_equal(pixels(data_uri(shown)).transpose(2, 0, 1), image[0].numpy())


def test_a_page_carries_little_of_large_images() -> None:
    large = Pixels((3, 448, 224), (), ())
    worst = WorstSamples(12, NAMES, large, lambda logits, targets: -logits[:, 0])
    noise = torch.rand(20, 3, 448, 224, generator=torch.Generator().manual_seed(0))
    worst.update(noise, torch.randn(20, 3), torch.zeros(20, dtype=torch.int64), 0, True)
    pictures = section(worst).pictures
    assert pixels(pictures[0].source).shape == (96, 48, 3)
    assert sum(len(picture.source) for picture in pictures) < 100_000
