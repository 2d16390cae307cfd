"""Weights from a file: safetensors or a torch state dict. No code is unpickled; a misfit is refused in one line."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from echelon.core.errors import UserError

WRAPPERS = ("module.", "_orig_mod.")
NESTED = ("state_dict", "model", "model_state_dict")
COUNTER = "num_batches_tracked"


def load_weights(model: nn.Module, path: Path, new_head: bool = False) -> None:
    """Copy the file's tensors into the model; every parameter and buffer must be there, with its shape.

    BatchNorm's batch counter may be missing (older files have none). With `new_head`, the classifier keeps its own
    values where the file's has another number of classes.

    Raises:
        UserError: the file cannot be read, or does not fit: names the first parameter, both shapes, and the fix.
    """
    state = read_weights(path)
    model_state = model.state_dict()
    if new_head:
        state |= {
            name: model_state[name]
            for name in _head(model_state)
            if name in state and _only_classes_differ(state[name], model_state[name])
        }
    _check(state, model_state, path)
    model.load_state_dict(state, strict=False)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read name -> tensor from safetensors or a torch file, on the CPU; the format is told by the content.

    A dict nested under `state_dict` or `model` is unwrapped, and so are the prefixes of DistributedDataParallel
    (`module.`) and torch.compile (`_orig_mod.`).

    Raises:
        UserError: no such file, or not such a file, or it holds other things than tensors.
    """
    if not path.is_file():
        reason = "this is a folder" if path.is_dir() else "no such file"
        raise UserError(f"--weights {path}: {reason}; name a file of weights")
    try:
        content = _read(path)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError, OSError) as error:
        raise UserError(
            f"--weights {path} cannot be read as safetensors or as a torch state dict saved with torch.save "
            f"({str(error).splitlines()[0][:120] if str(error) else type(error).__name__}); nothing else is unpickled"
        ) from error
    return _unwrap(content, path)


def _read(path: Path) -> Any:
    with path.open("rb") as file:
        start = file.read(9)
    if len(start) == 9 and start[8:] == b"{":
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(path)
        except SafetensorError as error:
            raise ValueError(str(error)) from error
    return torch.load(path, map_location="cpu", weights_only=True)


def _unwrap(content: Any, path: Path) -> dict[str, Tensor]:
    while isinstance(content, Mapping) and any(isinstance(content.get(key), Mapping) for key in NESTED):
        content = next(content[key] for key in NESTED if isinstance(content.get(key), Mapping))
    if not isinstance(content, Mapping) or not content or not all(isinstance(t, Tensor) for t in content.values()):
        raise UserError(f"--weights {path} holds no state dict (name -> tensor): save model.state_dict()")
    state = {str(name): tensor for name, tensor in content.items()}
    for prefix in WRAPPERS:
        if all(name.startswith(prefix) for name in state):
            state = {name.removeprefix(prefix): tensor for name, tensor in state.items()}
    return state


def _check(state: Mapping[str, Tensor], model_state: Mapping[str, Tensor], path: Path) -> None:
    missing = [name for name in model_state if name not in state and not name.endswith(COUNTER)]
    unexpected = [name for name in state if name not in model_state]
    if missing or unexpected:
        what = f"has no {missing[0]!r}" if missing else f"has {unexpected[0]!r}, which the model has not"
        raise UserError(
            f"--weights {path} {what} ({len(missing)} missing, {len(unexpected)} unexpected of {len(model_state)}): "
            "it is of another model; name that one with --model"
        )
    wrong = [name for name in model_state if name in state and state[name].shape != model_state[name].shape]
    if not wrong:
        return
    name = wrong[0]
    shapes = f"{name!r} is {_shape(state[name])} in the file and {_shape(model_state[name])} in the model"
    if set(wrong) <= _head(model_state) and all(_only_classes_differ(state[name], model_state[name]) for name in wrong):
        raise UserError(
            f"--weights {path}: {shapes}: its classifier is for {len(state[name])} classes, the data has "
            f"{len(model_state[name])}; use weights of as many classes, or load_weights(model, path, new_head=True) "
            "from Python"
        )
    raise UserError(
        f"--weights {path}: {shapes} ({len(wrong)} of {len(model_state)} differ): "
        "use the --model, channels and --image-size that the file was made with"
    )


def _head(model_state: Mapping[str, Tensor]) -> set[str]:
    """Return the names of the last weight and its bias: the classifier in every classification network known here."""
    last = next(
        (name for name in reversed(list(model_state)) if name.endswith("weight") and model_state[name].ndim >= 2), None
    )
    if last is None:
        return set()
    bias = f"{last.removesuffix('weight')}bias"
    return {last, bias} & set(model_state)


def _only_classes_differ(a: Tensor, b: Tensor) -> bool:
    return a.ndim == b.ndim > 0 and a.shape[1:] == b.shape[1:] and len(a) != len(b)


def _shape(tensor: Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a scalar"
