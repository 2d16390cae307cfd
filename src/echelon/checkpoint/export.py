"""A model's weights as one plain safetensors file, for use outside of Echelon."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from echelon.checkpoint.files import sync, temporary, write_durable
from echelon.checkpoint.tensors import stage
from echelon.core.errors import UserError


def export_weights(module_state: Mapping[str, Tensor], path: Path) -> None:
    """Write a module's `state_dict()` to one safetensors file at `path`, whole or not at all.

    Tensors that share memory (tied weights) are written once per name. An older file at `path` is replaced.
    Raises UserError when it cannot be written.
    """
    from safetensors.torch import save

    unfinished = temporary(path)
    tensors = {name: tensor.contiguous() for name, tensor in stage(module_state).items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            # Not save_file: it hides a full disk inside an error of its own.
            write_durable(unfinished, save(tensors, metadata={"format": "pt"}))
            unfinished.rename(path)
        finally:
            unfinished.unlink(missing_ok=True)
        sync(path.parent)
    except OSError as error:
        raise UserError(f"cannot write the weights to {path}: {error.strerror or error}") from error
