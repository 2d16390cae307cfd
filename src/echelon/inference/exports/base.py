"""What a format of exports is asked: to write a trained model, and to read it back as other programs would."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from echelon.core.errors import UserError
from echelon.data.columns import RUN_FILE as COLUMNS_FILE
from echelon.data.recipe import pixels_beside, shorter_side
from echelon.data.sound_features import open_features
from echelon.data.tokenisers import RUN_FILE as TOKENISER_FILE
from echelon.run.trained import TrainedModel
from echelon.tasks.nest import Nest

Predictor = Callable[[Nest], Any]
"""Maps the inputs of a batch to the model's outputs."""


class ExportFormat(ABC):
    """A format.

    Attributes:
        needs_data: inputs of the run's data are needed to write it.
        holds_weights_alone: it can be written without the model's code (`write_weights`).
    """

    needs_data: ClassVar[bool] = True
    holds_weights_alone: ClassVar[bool] = False

    @abstractmethod
    def write(self, trained: TrainedModel, path: Path, example: Nest) -> None:
        """Write a model to a path that does not exist.

        Args:
            example: inputs of at least two samples, as the model takes them.

        Raises:
            UserError: the model cannot be written in this format; says what can.
        """

    @abstractmethod
    def read(self, trained: TrainedModel, path: Path) -> Predictor:
        """Return what was written as a function of a batch's inputs, run by what such files are made for."""

    def write_weights(self, weights: Mapping[str, Tensor], path: Path) -> None:
        """Write tensors of any shape by name, read them back and compare them bit by bit.

        Raises:
            UserError: the file does not hold exactly these; names the first one that differs.
        """
        raise NotImplementedError(f"{type(self).__name__} needs the model")

    def first_difference(self, trained: TrainedModel, path: Path, inputs: Nest) -> str:
        """Return the name of the first layer whose outputs differ from the model's; empty: it cannot be told."""
        return ""


def description(trained: TrainedModel) -> dict[str, str]:
    """Return what a program has to know beside the model: task, classes, and what is done to samples, as JSON texts."""
    info = trained.info
    texts = {
        "task": trained.task.name,
        "classes": json.dumps(list(info.classes), ensure_ascii=False),
        "preprocessing": Preprocessing.of(trained).as_json(),
    }
    if info.target_names:
        measured = {"names": info.target_names, "mean": info.target_mean, "std": info.target_std}
        texts["targets"] = json.dumps(measured, ensure_ascii=False)
    return texts


@dataclass(frozen=True)
class Preprocessing:
    """What is done to samples before the model takes them; what is None is not done.

    Attributes:
        layout, channels, fit_longer_side, resize_shorter_side, centre_crop, divide_by, mean, std: of images, in pixels.
        interpolation: how they are resized; the pixels are rounded to whole numbers before they are divided.
        place, fill: where an image that fits a square lies in it, and the pixel beside it, by channel, 0 to 255.
        own_transform: name of the user's own function that inputs go through besides (`--eval-transform`).
        features, bands, samples_per_second: of sounds.
        feature_extractor: of transformers, which makes the same features of sounds.
        columns: of a table, in their order; `measured_columns` is the run's file of what they are.
        tokeniser: the run's file.
    """

    layout: str | None = None
    channels: int | None = None
    fit_longer_side: int | None = None
    resize_shorter_side: int | None = None
    centre_crop: int | None = None
    interpolation: str | None = None
    place: str | None = None
    fill: Sequence[int] | None = None
    divide_by: int | None = None
    mean: Sequence[float] | None = None
    std: Sequence[float] | None = None
    own_transform: str | None = None
    features: str | None = None
    bands: int | None = None
    samples_per_second: int | None = None
    feature_extractor: object = None
    columns: Sequence[str] | None = None
    tokeniser: object = None
    measured_columns: object = None

    @classmethod
    def of(cls, trained: TrainedModel) -> Preprocessing:
        """Return what a run does to its samples."""
        info, pictures = trained.info, bool(trained.info.mean)
        sounds = open_features(trained.features) if info.rate else None
        extractor = sounds.extractor(info.rate) if sounds else None
        fits = trained.task.unit == "pixel"  # nothing of a mask is cut off
        return cls(
            layout="NCHW" if pictures else None,
            channels=info.channels if pictures else None,
            fit_longer_side=info.image_size if pictures and fits else None,
            resize_shorter_side=shorter_side(info.image_size) if pictures and not fits else None,
            centre_crop=info.image_size if pictures and not fits else None,
            interpolation="bilinear, antialiased" if pictures else None,
            place="top left" if pictures and fits else None,
            fill=pixels_beside(info) if pictures and fits else None,
            divide_by=255 if pictures else None,
            mean=info.mean or None,
            std=info.std if pictures else None,
            own_transform=trained.config.data.eval_transform or None,
            features=None if sounds is None else sounds.name,
            bands=(sounds.bands or None) if sounds else None,
            feature_extractor=extractor.to_dict() if extractor else None,
            samples_per_second=info.rate or None,
            columns=info.columns or None,
            tokeniser=_file_of(trained, TOKENISER_FILE),
            measured_columns=_file_of(trained, COLUMNS_FILE),
        )

    def as_json(self) -> str:
        """Return it as JSON, without what is not done."""
        return json.dumps({name: v for name, v in vars(self).items() if v is not None}, ensure_ascii=False)


def _file_of(trained: TrainedModel, name: str) -> object:
    file = trained.folder / name
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None


def cannot_be_traced(path: Path, error: Exception) -> UserError:
    """Return in one line why a model's computation cannot be written down."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    reason = lines[0][:200]
    if reason.startswith("Constraints violated (batch)"):
        reason = "torch.export fixes its size of a batch, as it does for recurrent layers that are given a first state"
    return UserError(
        f"{path}: this model cannot be written as {path.suffix} ({reason}): .safetensors holds its weights"
    )
