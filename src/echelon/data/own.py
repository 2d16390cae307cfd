"""Data sets of the user's own: objects from Python, or `module:function`."""

from __future__ import annotations

import inspect
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from echelon.core.errors import UserError
from echelon.core.own import find_own
from echelon.data.base import DataInfo, Source
from echelon.data.images import ImageArray, ImageItems, Images, Labels, TensorArray, TensorItems, random_state_kept
from echelon.data.statistics import measure
from echelon.data.torchvision_sets import labels_of

_MOST_READ_FOR_LABELS = 20_000


def from_datasets(train: Dataset[Any], evaluation: Dataset[Any], classes: Sequence[str] | None = None) -> Source:
    """Use map-style data sets whose items are (input, label).

    Inputs are used as they come, unless they are square uint8 images `(1 or 3, S, S)`: these are augmented as
    configured and normalised. All inputs have one shape. Random numbers that a data set draws from torch, numpy or
    `random` while it makes an item are seeded per (seed, epoch, index), so they do not depend on workers or loaders.

    Args:
        train: with `len` and items; `targets` or `labels` spare reading every item once.
        evaluation: likewise.
        classes: names by label; from the labels when left out.

    Raises:
        UserError: a data set is empty, its items are of another kind, or a label is no class.
    """
    name = type(train).__name__
    for part, data in (("training", train), ("evaluation", evaluation)):
        if not hasattr(data, "__len__") or not hasattr(data, "__getitem__") or len(data) == 0:
            raise UserError(f"data {name}: the {part} data needs a length above 0 and items by index (map-style)")
    with random_state_kept():
        first = _first_input(name, train)
        labels, held_labels = _labels(name, train), _labels(name, evaluation)
    names = tuple(classes) if classes else tuple(str(i) for i in range(int(max(labels.max(), held_labels.max())) + 1))
    if min(labels.min(), held_labels.min()) < 0 or max(labels.max(), held_labels.max()) >= len(names):
        raise UserError(f"data {name}: labels must be 0 to {len(names) - 1}, for the {len(names)} classes")
    is_image = first.dtype == torch.uint8 and first.ndim == 3 and first.shape[0] in (1, 3)
    if is_image and first.shape[1] != first.shape[2]:
        raise UserError(f"data {name}: uint8 images must be square, not {tuple(first.shape)}; or give float tensors")
    channels = int(first.shape[0]) if first.ndim else 1
    side = int(first.shape[-1]) if first.ndim == 3 else 1
    data, held = _samples(train, labels, is_image), _samples(evaluation, held_labels, is_image)
    mean, std = measure(data, side) if isinstance(data, Images) else ((), ())
    counts = tuple(np.bincount(labels, minlength=len(names)).tolist())
    as_it_comes = () if is_image else (tuple(first.shape), str(first.dtype).removeprefix("torch."))
    info = DataInfo(name, names, channels, side, len(labels), len(held_labels), counts, mean, std, *as_it_comes)
    return Source(data, held, info)


def example_inputs(source: Source) -> torch.Tensor | None:
    """Return two samples' inputs of a data set that is used as it comes, the same in every process; None for images."""
    data = source.train
    if not isinstance(data, TensorArray | TensorItems):
        return None
    with random_state_kept():
        random.seed(0)
        np.random.seed(0)
        torch.manual_seed(0)
        return torch.stack([data[i % len(data)][0] for i in range(2)])


def _samples(data: Any, labels: Labels, is_image: bool) -> Images | TensorArray | TensorItems:
    """Take tensors in memory as they are, a whole batch at a time; anything else item by item."""
    tensor = data.tensors[0] if type(data) is TensorDataset else None
    if type(data) is Subset and type(data.dataset) is TensorDataset:
        tensor = data.dataset.tensors[0][torch.as_tensor(data.indices)]
    if tensor is None:
        return ImageItems(data, labels) if is_image else TensorItems(data, labels)
    values = tensor.detach().cpu().contiguous().numpy()
    return ImageArray(values, labels) if is_image else TensorArray(values, labels)


def from_function(name: str) -> Source:
    """Call `module:function`, which returns a `Source` or what `from_datasets` takes, (train, evaluation[, classes]).

    The current folder is searched too, as `python -m` does.

    Raises:
        UserError: there is no such module or function, or it returns something else.
    """
    function = find_own("data", name)
    if not callable(function):
        raise UserError(f"data {name} is a {type(function).__name__}: name a function that returns the data")
    try:
        needed = [p.name for p in inspect.signature(function).parameters.values() if _must_be_given(p)]
    except ValueError:  # some functions written in C do not tell
        needed = []
    if needed:
        raise UserError(f"data {name}: it is called without arguments, but needs {', '.join(needed)}: give defaults")
    given = function()
    if isinstance(given, Source):
        return given
    if not isinstance(given, (tuple, list)) or len(given) not in (2, 3):
        raise UserError(f"data {name} must return (train, evaluation) or (train, evaluation, classes)")
    return from_datasets(*given)


def _must_be_given(parameter: inspect.Parameter) -> bool:
    open_ended = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return parameter.default is inspect.Parameter.empty and parameter.kind not in open_ended


def _first_input(name: str, data: Any) -> torch.Tensor:
    item = data[0]
    if not isinstance(item, (tuple, list)) or len(item) != 2 or not isinstance(item[0], (torch.Tensor, np.ndarray)):
        raise UserError(f"data {name}: items must be (tensor, label), not {_shape(item)}")
    if item[0].dtype == torch.bfloat16:
        raise UserError(f"data {name}: bfloat16 inputs cannot be loaded: give float32, and use --precision bf16")
    return torch.as_tensor(item[0])


def _shape(item: Any) -> str:
    if isinstance(item, (tuple, list)):
        return f"({', '.join(type(part).__name__ for part in item)})"
    return type(item).__name__


def _labels(name: str, data: Any) -> Labels:
    if isinstance(data, Subset):
        return _labels(name, data.dataset)[np.asarray(data.indices)]
    if isinstance(data, TensorDataset):
        return np.asarray(data.tensors[1], dtype=np.int64)
    found = labels_of(data)
    if found is not None and len(found) == len(data):
        return found
    if len(data) > _MOST_READ_FOR_LABELS:
        raise UserError(f"data {name}: give the data set `targets`, a list of its {len(data)} labels")
    return np.array([int(data[i][1]) for i in range(len(data))], dtype=np.int64)
