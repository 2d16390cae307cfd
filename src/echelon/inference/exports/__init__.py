"""Files that a trained model is written to, one file of code a format; suffixes are known without an import."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING

from echelon.core.errors import UserError, nearest

if TYPE_CHECKING:
    from echelon.inference.exports.base import ExportFormat

FORMATS = {
    ".safetensors": "safetensors_file:SafetensorsFile",
    ".onnx": "onnx_file:OnnxFile",
    ".pt2": "torch_program:TorchProgram",
    ".keras": "keras_file:KerasFile",
    ".peft": "peft_adapter:PeftAdapter",
    "": "transformers_folder:TransformersFolder",
}
"""Classes of `ExportFormat` by the suffix of what is written; without one it is a folder of transformers."""


def format_of(path: Path) -> ExportFormat:
    """Return the format that a file's suffix names.

    Raises:
        UserError: no format has it.
    """
    name = FORMATS.get(path.suffix)
    if name is None:
        known = [suffix for suffix in FORMATS if suffix]
        raise UserError(
            f"{path}: no export ends in {path.suffix}: {nearest(path.suffix, known)}write {', '.join(known)}, or a "
            "folder for transformers"
        )
    module, _, kind = name.partition(":")
    built: ExportFormat = getattr(importlib.import_module(f"{__name__}.{module}"), kind)()
    return built
