"""`.keras`: a model of Keras with its trained weights, for `keras.saving.load_model`."""

from __future__ import annotations

from pathlib import Path

from echelon.core.errors import UserError
from echelon.inference.exports.base import ExportFormat, Predictor
from echelon.models.keras_model import KerasModule, read_keras
from echelon.run.trained import TrainedModel
from echelon.tasks import nest
from echelon.tasks.nest import Nest


class KerasFile(ExportFormat):
    """What Keras itself writes and reads."""

    needs_data = False

    def write(self, trained: TrainedModel, path: Path, example: Nest) -> None:
        """Write layers and weights, as `model.save` does."""
        _of_keras(trained, path).write(path)

    def read(self, trained: TrainedModel, path: Path) -> Predictor:
        """Return the model that Keras makes of the file."""
        model = read_keras(path, _of_keras(trained, path)).eval()
        return lambda inputs: nest.call(model, inputs)


def _of_keras(trained: TrainedModel, path: Path) -> KerasModule:
    """Return the model, which is one of Keras.

    Raises:
        UserError: it is none.
    """
    if not isinstance(trained.model, KerasModule):
        raise UserError(
            f"{path}: the model {trained.config.model.name} is none of Keras: write a file that ends in .safetensors, "
            ".onnx or .pt2"
        )
    return trained.model
