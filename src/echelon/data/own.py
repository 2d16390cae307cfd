"""Data sets of the user's own: objects from Python."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from echelon.core.errors import UserError
from echelon.data.base import CLASS_NUMBER, DataInfo, Source, class_notes
from echelon.data.images import (
    ImageArray,
    ImageItems,
    Images,
    TensorArray,
    TensorItems,
    as_sample,
    class_of,
    labels_of,
    random_state_kept,
)
from echelon.data.labelled_files import Labels
from echelon.data.lengths import Measured, first_sample, joined_specs, measured, of_stream, read_item
from echelon.data.order import Indices, split
from echelon.data.statistics import measure
from echelon.data.stream import Stream, is_stream
from echelon.tasks import nest
from echelon.tasks.base import NO_TARGET, TargetValues
from echelon.tasks.nest import Nest, TensorSpec

_MOST_READ_FOR_LABELS = 20_000
_DIGESTED = 16  # samples whose inputs tell data from others
_LOOKED_AT = 8  # items, for the values of their targets
_PROMISE = (
    "samples come in its own order, each once in an epoch as far as it gives the same each time, and each process "
    "reads through all of it"
)
MOST_CLASSES = 1_000_000  # beyond, whole numbers are no classes


def from_datasets(train: Dataset[Any], evaluation: Dataset[Any], classes: Sequence[str] | None = None) -> Source:
    """Use data sets whose items are (input, target), (input, input, ..., target), or dicts with a target.

    Inputs are used as they come, unless they are square uint8 images `(1 or 3, S, S)` with a class each: these are
    augmented as configured and normalised. Tensors of items have the same shapes, or differ in the length of their
    first axis: a batch is then padded to the longest of all workers' samples, inputs with 0, targets with -100, and
    batches hold samples of similar lengths. Random numbers that a data set draws from torch, numpy or `random` while it
    makes an item are seeded per (seed, epoch, index), so they do not depend on workers or loaders. Targets that are
    whole numbers from 0 may be classes; any others are for other tasks.

    Args:
        train: with `len` and items. `targets` or `labels` spare reading every item once; so does `lengths` where they
            differ in length, a whole number for each item: at least that of its longest tensor. One that can
            only be iterated is trained on in its own order (`data.stream`).
        evaluation: likewise.
        classes: names by label; from the labels when left out.

    Raises:
        UserError: a data set is empty, its items are of another kind, shapes differ in more than their first axis, or
            a label is none of `classes`.
    """
    name = type(train).__name__
    train, evaluation = _by_index("training", train), _by_index("evaluation", evaluation)
    with random_state_kept():
        inputs, targets = first_sample(name, train)
        read, held_read = (_measured(name, part, (inputs, targets)) for part in (train, evaluation))
        both = (_labels(name, train, read), _labels(name, evaluation, held_read)) if _is_class(targets) else None
    names = _class_names(name, both, classes)
    first = inputs if isinstance(inputs, torch.Tensor) else None
    is_image = bool(names) and first is not None and first.dtype == torch.uint8 and first.ndim == 3
    is_image = is_image and first is not None and first.shape[0] in (1, 3)
    if is_image and isinstance(train, Stream):
        raise UserError(f"data {name}: images that come one after the other are used as they are: give float tensors")
    if is_image and first is not None and first.shape[1] != first.shape[2]:
        raise UserError(f"data {name}: uint8 images must be square, not {tuple(first.shape)}; or give float tensors")
    labels, held_labels = both if both is not None else (None, None)
    data, held = _samples(train, labels, is_image, read), _samples(evaluation, held_labels, is_image, held_read)
    side = int(first.shape[-1]) if first is not None and first.ndim == 3 else 1
    mean, std = measure(data, side) if isinstance(data, Images) else ((), ())
    values = None if both is not None else seen_values(data, held)
    several, targets = _specs(name, (inputs, targets), evaluation, (read, held_read))
    is_ragged = first is not None and several.ragged
    if first is None:
        several = _with_counts(several, data, held)
        targets = _with_marks(targets, values, data)
    info = DataInfo(
        name, names, int(first.shape[0]) if first is not None and first.ndim and not is_ragged else 1, side,
        len(train), len(evaluation),  # type: ignore[arg-type]
        tuple(np.bincount(labels, minlength=len(names)).tolist()) if names and labels is not None else (), mean, std,
        shape=None if is_image or first is None or is_ragged else tuple(first.shape),
        dtype="float32" if is_image or first is None else several.dtype,
        several=several if first is None or is_ragged else None,
        targets=targets if labels is None else CLASS_NUMBER,
        label_span=_span(both) if both is not None and not classes else None,
        target_values=values, task=_task_of(targets, values),
    )  # fmt: skip
    unlearnt = class_notes(info, held_labels) if held_labels is not None else ()
    return Source(data, held, info, (*_notes(name, (train, evaluation), (read, held_read)), *unlearnt))


def _notes(name: str, data: tuple[Any, Any], reads: tuple[Measured, Measured]) -> tuple[str, ...]:
    """Return what a user has to know of data that can only be iterated, and of samples that are padded."""
    streams = [part for part, each in zip(("training", "evaluation"), data, strict=True) if isinstance(each, Stream)]
    notes = [f"the {part} data can only be iterated: {_PROMISE}" for part in streams[:1]]
    lengths = [each.lengths for each in reads if each.lengths is not None]
    return (*notes, *(f"data {name}: {each.note()}" for each in lengths[:1]))


OwnData = Source | Dataset[Any] | tuple[Dataset[Any], ...]
"""A source; one data set, of which a part is held out; or (training, evaluation) or (training, validation, test)."""


def source_of(data: OwnData, holdout: float, seed: int, end: bool = False) -> Source:
    """Return data of a caller's own as a source.

    Args:
        holdout: share of a single data set that is held out for evaluation.
        seed: of that split.
        end: whether its end is held out, as of one text, in place of samples drawn by the seed.

    Raises:
        UserError: as `from_datasets`, or the tuple has another length.
    """
    if isinstance(data, Source):
        return data
    if not isinstance(data, (tuple, list)):
        if is_stream(data):
            raise UserError(
                f"data {type(data).__name__} can only be iterated, and no part of it can be held out: give two, "
                "(training, evaluation)"
            )
        _check_map_style("training", data)
        train, held = split(len(data), holdout, seed)  # type: ignore[arg-type]
        if end:
            train, held = np.split(np.arange(len(data)), [len(train)])  # type: ignore[arg-type]
        parts = [Subset(data, part.tolist()) for part in (train, held)]
        source = from_datasets(parts[0], parts[1])
        source = replace(source, train=_of_origin(source.train, train), evaluation=_of_origin(source.evaluation, held))
        note = (
            f"{'the last ' if end else ''}{len(held)} of the {len(train) + len(held)} samples are held out for "
            f"evaluation (--holdout {holdout:g})"
        )
        return replace(source, info=replace(source.info, name=type(data).__name__), notes=(*source.notes, note))
    if len(data) not in (2, 3):
        listed = "; a list of samples is none: wrap it in a torch.utils.data.Dataset" if len(data) > 3 else ""
        raise UserError(
            f"data: {len(data)} data sets: give one, (training, evaluation) or (training, validation, test){listed}"
        )
    source = from_datasets(data[0], data[1])
    if len(data) == 2:
        return source
    # beside the smaller of the two others, whose items may have to be read again
    return replace(source, test=from_datasets(data[1], data[2], source.info.classes or None).evaluation)


def _of_origin(samples: Dataset[Any], origin: Indices) -> Dataset[Any]:
    assert isinstance(samples, ImageArray | ImageItems | TensorArray | TensorItems)
    return replace(samples, origin=origin)


def name_of_data(data: OwnData) -> str:
    """Return what data of a caller's own is called: the name of its class."""
    if isinstance(data, Source):
        return data.info.name
    return type(data[0] if isinstance(data, (tuple, list)) and data else data).__name__


def _by_index(part: str, data: Any) -> Any:
    """Return data with items by index: what can only be iterated, as a stream.

    Raises:
        UserError: it has no items, or cannot be iterated again.
    """
    if is_stream(data):
        data = Stream(data, part)
    _check_map_style(part, data)
    return data


def _check_map_style(part: str, data: Any) -> None:
    if hasattr(data, "columns") and hasattr(data, "iloc"):
        raise UserError(
            f"data {type(data).__name__}: a data frame's items are its columns: write it to a table "
            "(to_parquet('rows.parquet')), and give its path, with input=... and target=..."
        )
    if not hasattr(data, "__len__") or not hasattr(data, "__getitem__") or len(data) == 0:
        name = type(data).__name__
        raise UserError(f"data {name}: the {part} data needs a length above 0 and items by index (map-style)")


def samples_digest(source: Source) -> str:
    """Return a digest of training data: of all its targets, and of some inputs, as far as these lie in memory.

    What a data set makes item by item is not asked for again: it may draw random numbers.
    """
    return _digest(source.train, source.info.train_size)


def evaluation_digest(source: Source) -> str:
    """Return a digest of evaluation data likewise, and of its size."""
    size = source.info.eval_size
    return _digest(source.evaluation, size, str(size).encode())


def _digest(data: Dataset[Any], size: int, beside: bytes = b"") -> str:
    digest = hashlib.sha256(beside)
    if isinstance(data, TensorArray):
        known, inputs = data.targets, data.values
    elif isinstance(data, ImageArray | ImageItems):
        known, inputs = data.labels, data.pixels if isinstance(data, ImageArray) else ()
    else:
        known, inputs = ((data.known_targets, _known_lengths(data)) if isinstance(data, TensorItems) else None), ()
    rows = np.linspace(0, max(0, size - 1), _DIGESTED).astype(int)
    for array in (*nest.leaves(known), *(x[rows] for x in nest.leaves(inputs) if isinstance(x, np.ndarray))):
        if isinstance(array, np.ndarray):
            digest.update(f"{array.dtype} {array.shape} ".encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()[:16]


def _known_lengths(data: TensorItems) -> Indices | None:
    return None if data.lengths is None else data.lengths.known


def stream_digests(source: Source) -> dict[str, str]:
    """Return, by part, a digest of the first items of data that can only be iterated, and of their number.

    Such data may see which of several processes reads it, and give each a share of its own.
    """
    parts = {"training": source.train, "evaluation": source.evaluation, "test": source.test}
    streams = {n: p.items for n, p in parts.items() if isinstance(p, TensorItems) and isinstance(p.items, Stream)}
    digests = {}
    for name, stream in streams.items():
        digest = hashlib.sha256(f"{len(stream)} ".encode())
        for i in range(min(_DIGESTED, len(stream))):
            for leaf in nest.leaves(as_sample(stream[i])):
                digest.update(f"{leaf.dtype} {tuple(leaf.shape)} ".encode())
                digest.update(leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
        digests[name] = digest.hexdigest()[:16]
    return digests


def example_samples(source: Source) -> tuple[Nest, Nest]:
    """Return two samples' inputs and targets, the same in every process.

    Inputs are None where they are images; zeros stand for these samples' targets. Different lengths are padded.

    Raises:
        UserError: the two are of different shapes.
    """
    data, info = source.train, source.info
    if not isinstance(data, TensorArray | TensorItems):
        return None, nest.blank(info.targets, 2)
    if isinstance(data, TensorArray):  # a batch of samples of different lengths is padded
        rows = np.arange(2) % len(data)
        inputs, targets = nest.map_leaves(lambda array: torch.as_tensor(array[rows]), (data.values, data.targets))
    else:
        with random_state_kept():
            random.seed(0)
            np.random.seed(0)
            torch.manual_seed(0)
            items = [data[i % len(data)] for i in range(2)]
        items = [tuple(_as_first(info.name, items[0][k], item[k]) for k in (0, 1)) for item in items]
        shapes = [[tuple(leaf.shape) for leaf in nest.leaves(item)] for item in items]
        if data.lengths is None and shapes[0] != shapes[1]:
            raise UserError(
                f"data {info.name}: its first two items have shapes {shapes[0]} and {shapes[1]}, and all must have "
                "one: pad them, or crop them, in the data set's __getitem__"
            )
        inputs, targets = nest.stack(items) if data.lengths is None else data.lengths.stacked(items)
    return inputs, nest.map_leaves(lambda leaf, spec: leaf.to(getattr(torch, spec.dtype)), targets, info.targets)


def _as_first(name: str, first: Nest, other: Nest) -> Nest:
    """Return part of an item with its tensors in the order of the first item's."""
    try:
        return nest.rebuild(first, iter(nest.leaves_as(first, other)))
    except ValueError as error:
        raise UserError(f"data {name}: item 1 has other tensors than item 0: {error}") from None


def _measured(name: str, data: Any, sample: tuple[Nest, Nest]) -> Measured:
    """Return what reading items tells of lengths; tensors in memory, and images, which are resized, are not read."""
    inputs, targets = sample
    is_image = isinstance(inputs, torch.Tensor) and inputs.dtype == torch.uint8 and inputs.ndim == 3
    if isinstance(data, Stream):
        return Measured(of_stream(name, data, data.shapes))
    if (is_image and _is_class(targets)) or _in_memory(data):
        return Measured()
    return measured(name, data)


def _in_memory(data: Any) -> bool:
    """Whether a data set is tensors that are taken as they are, or a part of such."""
    return type(data.dataset if type(data) is Subset else data) is TensorDataset


def _specs(
    name: str, sample: tuple[Nest, Nest], evaluation: Any, reads: tuple[Measured, Measured]
) -> tuple[Nest, Nest]:
    """Return the specs of inputs and targets; those that differ in length as long as the longest of both parts.

    Args:
        sample: the first one of the training data.
        reads: of the training and the evaluation data.
    """
    train, held = (each.lengths for each in reads)
    specs: tuple[Nest, Nest] = nest.map_leaves(_spec, sample)
    if train is None and held is None:
        return specs
    with random_state_kept():
        other = nest.map_leaves(_spec, first_sample(name, evaluation))
    specs = joined_specs(
        name, specs if train is None else train.fitted(specs), other if held is None else held.fitted(other)
    )
    return specs


def _samples(data: Any, labels: Labels | None, is_image: bool, read: Measured) -> Images | TensorArray | TensorItems:
    """Take tensors in memory as they are, a whole batch at a time; anything else item by item."""
    tensors = data.tensors if type(data) is TensorDataset else None
    if type(data) is Subset and type(data.dataset) is TensorDataset:
        tensors = tuple(tensor[torch.as_tensor(data.indices)] for tensor in data.dataset.tensors)
    if isinstance(data, Stream):  # whose order, and so the targets by place, may differ between epochs
        return TensorItems(data, lengths=read.lengths)
    if tensors is None:
        if is_image and labels is not None:
            return ImageItems(data, labels, are_fixed=_are_fixed(data))
        return TensorItems(data, labels, lengths=read.lengths)
    *values, wanted = (tensor.detach().cpu().contiguous().numpy() for tensor in tensors)
    if is_image and labels is not None:
        return ImageArray(values[0], labels)
    return TensorArray(tuple(values) if len(values) > 1 else values[0], wanted if labels is None else labels)


def _are_fixed(data: Any) -> bool:
    """Whether items are the same each time: those of torchvision's own data sets without a transform are."""
    while type(data) is Subset:
        data = data.dataset
    of_torchvision = type(data).__module__.startswith("torchvision.datasets.")
    return of_torchvision and getattr(data, "transforms", None) is None


def _class_names(name: str, both: tuple[Labels, Labels] | None, classes: Sequence[str] | None) -> tuple[str, ...]:
    """Return the names of the classes; empty where targets can be none."""
    if both is None:
        return ()
    least, most = _span(both)
    if classes:
        for part, labels in zip(("training", "evaluation"), both, strict=True):
            wrong = np.flatnonzero((labels < 0) | (labels >= len(classes)))
            if len(wrong):
                raise UserError(
                    f"data {name}: labels must be 0 to {len(classes) - 1}, for the {len(classes)} classes; sample "
                    f"{wrong[0]} of the {part} data has {labels[wrong[0]]}"
                )
        return tuple(classes)
    return () if least < 0 or most > MOST_CLASSES else tuple(str(i) for i in range(int(most) + 1))


def _span(both: tuple[Labels, Labels]) -> tuple[int, int]:
    return min(int(labels.min()) for labels in both), max(int(labels.max()) for labels in both)


def _is_class(targets: Nest) -> bool:
    one_number = isinstance(targets, torch.Tensor) and targets.ndim == 0
    return one_number and not targets.is_floating_point() and not targets.is_complex()


def _with_counts(specs: Nest, *parts: Dataset[Any]) -> Nest:
    """Return specs of several inputs, those of ids with their number: single whole numbers from 0, in memory."""
    if not all(isinstance(part, TensorArray) for part in parts):
        return specs

    def counted(spec: TensorSpec, *arrays: Any) -> TensorSpec:
        """Return the spec of an input with the number of its ids; of no ids as it is."""
        if spec.shape or spec.dtype not in ("int64", "int32") or min(int(array.min()) for array in arrays) < 0:
            return spec
        return replace(spec, count=max(int(array.max()) for array in arrays) + 1)

    return nest.map_leaves(counted, specs, *(part.values for part in parts))  # type: ignore[attr-defined]


def _with_marks(targets: Nest, values: TargetValues | None, data: Dataset[Any]) -> Nest:
    """Return the spec of targets, with the count of marks where all in memory are 0 or 1: those of ids are clicks."""
    one = isinstance(targets, TensorSpec) and not targets.shape and isinstance(data, TensorArray)
    return replace(targets, count=2) if one and values is not None and values.marks else targets


def _task_of(targets: Nest, values: TargetValues | None) -> str:
    """Return the task that targets are for: one number with a fraction or several are learnt by regression.

    One-hot rows are for none: classes are meant, and are refused as such unless a task is named.
    """
    one = targets if isinstance(targets, TensorSpec) and len(targets.shape) < 2 else None
    numbers = one is not None and not one.ragged and one.dtype.startswith("float") and not (values and values.one_hot)
    return "regression" if numbers else DataInfo.task


def seen_values(*parts: Dataset[Any]) -> TargetValues | None:
    """Return what values targets have: of tensors in memory all, of items that are made the first few."""
    seen = [target for part in parts for target in _some_targets(part)]
    if not seen or not all(isinstance(each, np.ndarray) and each.dtype.kind in "iuf" for each in seen):
        return None
    whole = seen[0].dtype.kind != "f"
    counted = [each[(each != 255) & (each != NO_TARGET)] if whole else each for each in seen]
    counted = [each for each in counted if each.size]
    if not counted:
        return None
    marks = all(bool(((each == 0) | (each == 1)).all()) for each in seen)
    one_hot = marks and all(each.ndim == 2 and each.shape[1] > 1 and bool((each.sum(1) == 1).all()) for each in seen)
    return TargetValues((min(float(x.min()) for x in counted), max(float(x.max()) for x in counted)), marks, one_hot)


def _some_targets(data: Dataset[Any]) -> list[Any]:
    if isinstance(data, TensorArray):
        return [data.targets]
    if not isinstance(data, TensorItems) or isinstance(data.items, Stream):
        return []
    with random_state_kept():
        targets = [data[i][1] for i in range(min(_LOOKED_AT, len(data)))]
    single = all(isinstance(each, torch.Tensor) for each in targets)
    return [np.stack([each.numpy() for each in targets])] if single and len({x.shape for x in targets}) == 1 else []


def _spec(leaf: torch.Tensor) -> TensorSpec:
    return TensorSpec(tuple(leaf.shape), str(leaf.dtype).removeprefix("torch."))


def _labels(name: str, data: Any, read: Measured) -> Labels:
    if read.labels is not None:
        return read.labels
    known = _known_labels(name, data)
    if known is not None:
        return known
    if len(data) > _MOST_READ_FOR_LABELS:
        raise UserError(
            f"data {name}: give the data set `targets`, a list of the labels of all its items, as these have them: "
            f"{len(data)} items are too many to read for it"
        )
    numbers = data.indices if isinstance(data, Subset) else range(len(data))
    labels = [class_of(name, int(number), read_item(data, i)) for i, number in enumerate(numbers)]
    return np.array(labels, dtype=np.int64)


def _known_labels(name: str, data: Any) -> Labels | None:
    """Return the labels that a data set has beside its items, and these have too; None: it has none."""
    if isinstance(data, Subset):
        of_all = _known_labels(name, data.dataset)
        return None if of_all is None else of_all[np.asarray(data.indices)]
    if isinstance(data, TensorDataset) and type(data).__getitem__ is TensorDataset.__getitem__:
        return np.asarray(data.tensors[-1], dtype=np.int64)
    found = labels_of(data)
    if found is not None and len(found) == len(data):
        some = np.unique(np.linspace(0, len(data) - 1, _LOOKED_AT).astype(int))
        if isinstance(data, Stream) or all(found[i] == class_of(name, int(i), read_item(data, int(i))) for i in some):
            return found  # what items give counts: `targets` may be those before a target_transform
    return None
