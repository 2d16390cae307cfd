"""What a format of exports is asked: to write a trained model, and to read it back as other programs would."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from echelon.core.errors import UserError
from echelon.data.columns import RUN_FILE as COLUMNS_FILE
from echelon.data.recipe import shorter_side
from echelon.data.sounds import BANDS
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
        """Write tensors by name, read them back and compare them bit by bit.

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
        "preprocessing": json.dumps(_preprocessing(trained), ensure_ascii=False),
    }
    if info.target_names:
        measured = {"names": info.target_names, "mean": info.target_mean, "std": info.target_std}
        texts["targets"] = json.dumps(measured, ensure_ascii=False)
    return texts


def _preprocessing(trained: TrainedModel) -> dict[str, Any]:
    info = trained.info
    steps: dict[str, Any] = {}
    if info.mean:
        side = info.image_size
        fits = trained.task.unit == "pixel"  # nothing of a mask is cut off
        how = {"fit_longer_side": side} if fits else {"resize_shorter_side": shorter_side(side), "centre_crop": side}
        steps |= {"layout": "NCHW", "channels": info.channels, **how}
        steps |= {"divide_by": 255, "mean": list(info.mean), "std": list(info.std)}
    if info.rate:
        steps |= {"features": "log_mel", "bands": BANDS, "samples_per_second": info.rate}
    if info.columns:
        steps["columns"] = list(info.columns)
    for name, file in (("tokeniser", TOKENISER_FILE), ("measured_columns", COLUMNS_FILE)):
        if (trained.folder / file).is_file():
            steps[name] = json.loads((trained.folder / file).read_text(encoding="utf-8"))
    return steps


def cannot_be_traced(path: Path, error: Exception) -> UserError:
    """Return in one line why a model's computation cannot be written down."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return UserError(
        f"{path}: this model cannot be written as {path.suffix} ({lines[0][:200]}): .safetensors holds its weights"
    )
