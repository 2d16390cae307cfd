"""Lengths of a caller's own samples, whose tensors differ in the length of their first axis, and their padding.

Batches are padded to the longest of the global batch. So that every rank knows how long that is, and which samples are
grouped, the lengths of data with items by index are known before the first step: the data set says them (`lengths`), or
each item is read once. Of data that can only be iterated each rank reads the whole global batch.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset

from echelon.core.errors import UserError
from echelon.data.images import about_item, as_sample, class_of
from echelon.data.labelled_files import Labels
from echelon.data.order import Indices
from echelon.data.ragged import SampleLengths, not_known
from echelon.observe.stacks import circumstances
from echelon.tasks import nest
from echelon.tasks.base import NO_TARGET
from echelon.tasks.nest import Nest, TensorSpec

MEASURING_S = 600.0
_LOOKED_AT = 8  # items, whose shapes tell whether lengths differ
_SAID = 300  # characters of what a data set raises
_MEND = "pad them, or crop them, in the data set's __getitem__"

Shapes = tuple[tuple[int, ...], ...]
"""Of the leaves of one sample: of its inputs, then of its targets."""


@dataclass(frozen=True)
class Measured:
    """What reading items told: lengths, None where they have one shape, and classes, None where nobody read them."""

    lengths: SampleLengths | None = None
    labels: Labels | None = None


def measured(name: str, data: Any) -> Measured:
    """Return the lengths of the items of a map-style data set, as it says them, or as reading all items once tells.

    Some are looked at; the others are not read where these have one shape.

    Args:
        name: of the data.
        data: with `len` and items; its `lengths`, a whole number for each item, at least as much as the longest tensor
            of the item that differs in length.

    Raises:
        UserError: shapes differ in more than the first axis, lengths are drawn at random, or `lengths` are none.
    """
    declared = _declared(data)
    spread = np.linspace(0, len(data) - 1, _LOOKED_AT).astype(int).tolist()
    ends = [] if declared is None else [int(declared.argmin()), int(declared.argmax())]
    places = sorted({0, min(1, len(data) - 1), *spread, *ends})
    looked_at = [_sample(name, read_item(data, i)) for i in places]
    first = looked_at[0]
    shapes = [_shapes(name, i, first, sample) for i, sample in zip(places, looked_at, strict=True)]
    if len(set(shapes)) == 1:
        return Measured()
    labels = None
    if declared is None:
        if getattr(_origin(data), "lengths", None) is not None:
            count = len(_origin(data))
            raise UserError(f"data {name}: its `lengths` must be a sequence of {count} whole numbers, one an item")
        every, labels = _read_all(name, data, first)
        for i, seen in zip(places, shapes, strict=True):
            if seen != every[i]:
                raise UserError(f"data {name}: {not_known(f'item {i}', *_first_difference(seen, every[i]))}")
    else:
        every = shapes
    longest = _differing(name, places if declared is not None else range(len(every)), every)
    leaves = [leaf for leaf, most in enumerate(longest) if most is not None]
    if declared is None:
        known = np.array([[each[leaf][0] for leaf in leaves] for each in every], dtype=np.int64)
    else:
        for i, each in zip(places, shapes, strict=True):
            if (most := max(each[leaf][0] for leaf in leaves)) > declared[i]:
                raise UserError(f"data {name}: {not_known(f'item {i}', most, int(declared[i]))}")
        known = np.repeat(declared[:, None], len(leaves), axis=1)
        longest = tuple(None if most is None else int(declared.max()) for most in longest)
    return Measured(SampleLengths(longest, _pads(name, first, longest), known, _tells(looked_at, longest)), labels)


def of_stream(name: str, items: Any, seen: set[Shapes]) -> SampleLengths | None:
    """Return what is known of lengths in data that can only be iterated; None: the first items have one shape.

    Args:
        items: by place.
        seen: shapes of items that were read before.

    Raises:
        UserError: shapes differ in more than the first axis.
    """
    looked_at = [_sample(name, read_item(items, i)) for i in range(min(_LOOKED_AT, len(items)))]
    first = looked_at[0]
    shapes = {_shapes(name, i, first, sample): i for i, sample in reversed(list(enumerate(looked_at)))}
    every = [*shapes, *(seen - set(shapes))]
    if len(every) == 1:
        return None
    longest = _differing(name, [*shapes.values(), *[-1] * (len(every) - len(shapes))], every)
    return SampleLengths(longest, _pads(name, first, longest), None, _tells(looked_at, longest))


def joined_specs(name: str, train: Nest, evaluation: Nest) -> Nest:
    """Return the specs of samples of both parts; where a leaf of one is ragged, as long as the longest of both.

    Raises:
        UserError: the evaluation data has other tensors.
    """
    try:
        others = nest.leaves_as(train, evaluation)
    except ValueError as error:
        raise UserError(f"data {name}: the evaluation data has other tensors than the training data: {error}") from None

    def joined(spec: TensorSpec, other: TensorSpec) -> TensorSpec:
        """Return the spec of one leaf."""
        if not (spec.ragged or other.ragged) or not spec.shape or not other.shape:
            return spec
        return replace(spec, shape=(max(spec.shape[0], other.shape[0]), *spec.shape[1:]), ragged=True)

    pairs = zip(nest.leaves(train), others, strict=True)
    return nest.rebuild(train, iter([joined(spec, other) for spec, other in pairs]))


def first_sample(name: str, data: Any) -> tuple[Nest, Nest]:
    """Return the inputs and targets of the first item.

    Raises:
        UserError: they cannot be trained on.
    """
    try:
        inputs, targets = as_sample(read_item(data, 0))
    except UserError as error:
        raise UserError(f"data {name}: {error}") from error
    for leaf in nest.leaves((inputs, targets)):
        if leaf.dtype == torch.bfloat16:
            raise UserError(f"data {name}: bfloat16 inputs cannot be loaded: give float32, and use --precision bf16")
    return inputs, targets


def read_item(data: Any, i: int) -> Any:
    """Return an item.

    Raises:
        UserError: the data set raises; says for which item, and where.
    """
    try:
        return data[i]
    except UserError:
        raise
    except Exception as error:  # the caller's code may raise any
        number = int(data.indices[i]) if isinstance(data, Subset) else i
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:_SAID]}"
        error.add_note(about_item(error, number))
        raise UserError(f"data {type(data).__name__}: {said} ({circumstances(error)})") from error


def _origin(data: Any) -> Any:
    while isinstance(data, Subset):
        data = data.dataset
    return data


def _declared(data: Any) -> Indices | None:
    """Return the lengths that a data set says its items have at most, `(N,)`; None: it says none."""
    if isinstance(data, Subset):
        whole = _declared(data.dataset)
        return None if whole is None else whole[np.asarray(data.indices)]
    try:
        found = np.asarray(getattr(data, "lengths", None))
    except (TypeError, ValueError, RuntimeError):  # a sequence of sequences, or of tensors
        return None
    is_of_items = found.ndim == 1 and found.dtype.kind in "iu" and len(found) == len(data) and found.min() >= 0
    return found.astype(np.int64) if is_of_items else None


def _sample(name: str, item: Any) -> tuple[Nest, Nest]:
    try:
        return as_sample(item)
    except UserError as error:
        raise UserError(f"data {name}: {error}") from error


def _shapes(name: str, i: int, first: Nest, sample: Nest) -> Shapes:
    """Return the shapes of a sample's leaves, in the order of the first sample's."""
    try:
        return tuple(tuple(leaf.shape) for leaf in nest.leaves_as(first, sample))
    except ValueError as error:
        raise UserError(f"data {name}: item {i} has other tensors than item 0: {error}") from None


def _read_all(name: str, data: Any, first: Nest) -> tuple[list[Shapes], Labels | None]:
    """Read each item once; returns shapes, and classes where targets are one whole number each."""
    target, ends = first[1], time.monotonic() + MEASURING_S
    is_class = (
        isinstance(target, Tensor) and target.ndim == 0 and not (target.is_floating_point() or target.is_complex())
    )
    shapes: list[Shapes] = []
    labels: list[int] = []
    for i in range(len(data)):
        item = read_item(data, i)
        shapes.append(_shapes(name, i, first, _sample(name, item)))
        if is_class:
            labels.append(class_of(name, i, item))
        if time.monotonic() > ends:
            raise UserError(
                f"data {name}: samples differ in length, and reading {i + 1} of {len(data)} items took "
                f"{MEASURING_S / 60:g} minutes: give the data set `lengths`, a whole number for each item, its length"
            )
    return shapes, np.array(labels, dtype=np.int64) if is_class else None


def _differing(name: str, numbers: Sequence[int], shapes: Sequence[Shapes]) -> tuple[int | None, ...]:
    """Return the longest of each leaf whose first axis differs between samples; None of the others.

    Args:
        numbers: of the samples, for messages; -1: unknown.

    Raises:
        UserError: other axes differ.
    """
    first = shapes[0]
    for number, each in zip(numbers, shapes, strict=True):
        for shape, wanted in zip(each, first, strict=True):
            if len(shape) == len(wanted) and shape[1:] == wanted[1:]:
                continue
            hint = _MEND
            if len(shape) == len(wanted) > 1 and shape[:-1] == wanted[:-1]:
                hint = f"put the axis that differs first (x.transpose(0, -1)), or {_MEND}"
            which = f"item {number}" if number >= 0 else "an item"
            raise UserError(
                f"data {name}: {which} has shape {shape} and item {numbers[0]} {wanted}: samples may differ in the "
                f"length of their first axis alone: {hint}"
            )
    columns = [{shape[0] if shape else 0 for shape in column} for column in zip(*shapes, strict=True)]
    return tuple(max(lengths) if len(lengths) > 1 else None for lengths in columns)


def _pads(name: str, sample: tuple[Nest, Nest], longest: tuple[int | None, ...]) -> tuple[float, ...]:
    """Return what each leaf is padded with: 0; of targets `NO_TARGET`, but for masks.

    Raises:
        UserError: targets cannot hold that.
    """
    inputs, targets = sample
    pads: list[float] = [0.0] * len(nest.leaves(inputs))
    for leaf, (key, value) in enumerate(_named(targets), len(pads)):
        is_mask = value.dtype == torch.bool or "mask" in key
        if longest[leaf] is not None and not is_mask and not value.dtype.is_signed:
            kind = str(value.dtype).removeprefix("torch.")
            raise UserError(
                f"data {name}: targets of different lengths are padded with {NO_TARGET}, which {kind} cannot hold: "
                "give int64 targets"
            )
        pads.append(0.0 if is_mask else float(NO_TARGET))
    return tuple(pads)


def _named(value: Nest, key: str = "") -> Iterator[tuple[str, Tensor]]:
    """Give the leaves of a nest, each with the last key that leads to it."""
    if isinstance(value, Mapping):
        for name, child in value.items():
            yield from _named(child, str(name))
    elif nest.is_container(value):
        for leaf in nest.leaves(value):
            yield key, leaf
    else:
        yield key, value


def _tells(samples: Sequence[tuple[Nest, Nest]], longest: tuple[int | None, ...]) -> bool:
    """Whether one of several inputs is a mask of ones, or the length of another one, in all samples that were read."""
    columns = list(zip(*(nest.leaves(inputs) for inputs, _ in samples), strict=True))
    ragged = [column for column, most in zip(columns, longest, strict=False) if most is not None]

    def is_length(column: Sequence[Tensor]) -> bool:
        """Whether an input is one whole number, the length of an input that differs in it."""
        if any(leaf.numel() != 1 or leaf.is_floating_point() for leaf in column):
            return False
        return any(all(int(a) == len(b) for a, b in zip(column, other, strict=True)) for other in ragged)

    masks = any(all(bool((leaf == 1).all()) for leaf in column) for column in ragged)
    return len(columns) > 1 and (masks or any(is_length(column) for column in columns))


def _first_difference(seen: Shapes, other: Shapes) -> tuple[int, int]:
    """Return how long the first leaf of other shape was and is."""
    return next((a[0] if a else 1, b[0] if b else 1) for a, b in zip(seen, other, strict=True) if a != b)
