"""`.safetensors`: the weights under plain names, for any program that has the model's code."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from echelon.checkpoint import export_weights
from echelon.core.errors import UserError
from echelon.inference.exports.base import ExportFormat, Predictor
from echelon.run.trained import TrainedModel
from echelon.tasks import nest
from echelon.tasks.nest import Nest


class SafetensorsFile(ExportFormat):
    """Weights alone, tied ones once under each name."""

    holds_weights_alone = True

    def write(self, trained: TrainedModel, path: Path, example: Nest) -> None:
        """Write the model's state dict."""
        export_weights(trained.model.state_dict(), path)

    def read(self, trained: TrainedModel, path: Path) -> Predictor:
        """Return a copy of the model with the weights of the file."""
        model = copy.deepcopy(trained.model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        model.load_state_dict(load_file(path))
        return lambda inputs: nest.call(model, inputs)

    def write_weights(self, weights: Mapping[str, Tensor], path: Path) -> None:
        """Write tensors of any shape by name, and compare what is in the file with them bit by bit."""
        export_weights(weights, path)
        read = load_file(path)
        wrong = [name for name, tensor in weights.items() if name not in read or not _same(tensor, read[name])]
        if wrong or len(read) != len(weights):
            name = wrong[0] if wrong else "a tensor"
            raise UserError(f"{path}: {name} was not written as it is: is the disk damaged?")

    def first_difference(self, trained: TrainedModel, path: Path, inputs: Nest) -> str:
        """Return the first tensor that differs."""
        read = load_file(path)
        return next((name for name, tensor in trained.model.state_dict().items() if not _same(tensor, read[name])), "")


def _same(tensor: Tensor, other: Tensor) -> bool:
    """Whether two tensors are the same, numbers that are none included."""
    alike = tensor.shape == other.shape and tensor.dtype == other.dtype
    return alike and torch.equal(tensor.nan_to_num(), other.nan_to_num())
