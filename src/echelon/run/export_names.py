"""The kinds of files that a trained model is written to, by suffix: known without importing what writes them."""

from __future__ import annotations

from pathlib import Path

from echelon.core.errors import UserError, nearest

EXPORT_FORMATS = {
    ".safetensors": "safetensors_file:SafetensorsFile",
    ".onnx": "onnx_file:OnnxFile",
    ".pt2": "torch_program:TorchProgram",
    ".keras": "keras_file:KerasFile",
    ".peft": "peft_adapter:PeftAdapter",
    "": "transformers_folder:TransformersFolder",
}
"""Module and class below `echelon.inference.exports` by suffix; without one it is a folder of transformers."""


def export_format(path: Path) -> str:
    """Return the format that a file's suffix names.

    Raises:
        UserError: no format has it.
    """
    name = EXPORT_FORMATS.get(path.suffix)
    if name is None:
        known = [suffix for suffix in EXPORT_FORMATS if suffix]
        raise UserError(
            f"{path}: {path.suffix} names no format: {nearest(path.suffix, known)}write {', '.join(known)}, or a "
            "folder for transformers"
        )
    return name
