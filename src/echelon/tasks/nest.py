"""Nests: tensors in tuples, lists, dicts and dataclasses, whose first axis is the samples.

A nest is a leaf (a tensor, an array, the `TensorSpec` of one), or a container of nests. Functions keep the containers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

Nest = Any
"""A leaf, or a tuple, named tuple, list, dict or dataclass of nests."""


@dataclass(frozen=True)
class TensorSpec:
    """Shape (without the samples' axis) and type of one tensor.

    Attributes:
        shape: of one sample; where samples differ in length, of the longest.
        dtype: name in torch.
        count: of ids, which are 0 to count - 1; 0: the numbers are no ids.
        ragged: whether samples differ in the length of their first axis; batches are then padded at its end.
    """

    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    count: int = 0
    ragged: bool = False

    def zeros(self, samples: int) -> Tensor:
        """Return zeros `(samples, *shape)`, which are also numbers of a vocabulary or class that any has."""
        return torch.zeros(samples, *self.shape, dtype=getattr(torch, self.dtype))

    def describe(self) -> str:
        """Return it in words: `(3,) of float32`."""
        return f"{self.shape} of {self.dtype}"


def is_container(value: Nest) -> bool:
    """Whether a value holds nests, and is no leaf."""
    return _holds_nests(type(value))  # type: ignore[arg-type]  # classes can be hashed


@cache  # steps of small models ask it some forty times, and abstract classes take long to answer
def _holds_nests(kind: type) -> bool:
    if issubclass(kind, (tuple, list, Mapping)):
        return True
    return is_dataclass(kind) and not issubclass(kind, TensorSpec)


def leaves(nest: Nest) -> list[Any]:
    """Return the leaves, in the order of the containers."""
    if not is_container(nest):
        return [nest]
    return [leaf for child in _children(nest) for leaf in leaves(child)]


def _children(nest: Nest) -> list[Any]:
    if isinstance(nest, Mapping):
        return list(nest.values())
    if isinstance(nest, (tuple, list)):
        return list(nest)
    return [getattr(nest, field.name) for field in fields(nest)]


def rebuild(like: Nest, values: Iterator[Any]) -> Nest:
    """Return a nest of the same containers as `like`, its leaves taken from `values` in order."""
    if not is_container(like):
        return next(values)
    return _filled(like, [rebuild(child, values) for child in _children(like)])


def _filled(like: Nest, children: list[Nest]) -> Nest:
    """Return a container like another one, with other children."""
    if isinstance(like, Mapping):
        return dict(zip(like, children, strict=True))
    if isinstance(like, tuple) and hasattr(like, "_fields"):
        return type(like)(*children)
    if isinstance(like, (tuple, list)):
        return type(like)(children)
    return replace(like, **{field.name: child for field, child in zip(fields(like), children, strict=True)})


def map_leaves(function: Callable[..., Any], nest: Nest, *others: Nest) -> Nest:
    """Return a nest of `function(leaf, leaf of each other nest)`; the others have the first one's containers."""
    if not is_container(nest):
        return function(nest, *others)
    if not others:
        return _filled(nest, [map_leaves(function, child) for child in _children(nest)])
    values = [function(*row) for row in zip(leaves(nest), *(leaves(other) for other in others), strict=True)]
    return rebuild(nest, iter(values))


def rows(nest: Nest) -> int:
    """Return the number of samples: the length of the first leaf's first axis; 0 of an empty nest."""
    found = leaves(nest)
    return len(found[0]) if found else 0


def tensor_split(nest: Nest, count: int) -> list[Nest]:
    """Cut along the samples' axis into `count` nests, whose sizes differ by at most one, as `Tensor.tensor_split`."""
    if count == 1:
        return [nest]
    if not is_container(nest):
        return list(nest.tensor_split(count))
    columns = [leaf.tensor_split(count) for leaf in leaves(nest)]
    return [rebuild(nest, iter([column[i] for column in columns])) for i in range(count)]


def take(nest: Nest, index: Any) -> Nest:
    """Return `leaf[index]` of every leaf."""
    return map_leaves(lambda leaf: leaf[index], nest)


def to_device(nest: Nest, device: torch.device) -> Nest:
    """Return a nest of tensors on a device; copies from pinned memory do not wait."""
    return map_leaves(lambda leaf: leaf.to(device, non_blocking=True), nest)


def blank(specs: Nest, samples: int) -> Nest:
    """Return zeros of some samples for a nest of `TensorSpec`."""
    return map_leaves(lambda spec: spec.zeros(samples), specs)


def describe(specs: Nest) -> str:
    """Return a nest of specs in words."""
    return " and ".join(spec.describe() for spec in leaves(specs))


def stack(items: list[Nest]) -> Nest:
    """Stack the tensors of samples along a new first axis."""
    return map_leaves(lambda *column: torch.stack([torch.as_tensor(each) for each in column]), *items)


def call(module: nn.Module | Callable[..., Any], inputs: Nest) -> Any:
    """Call a model with its inputs: a tensor as it is, a tuple or list by position, a dict by name."""
    if isinstance(inputs, Mapping):
        return module(**inputs)
    if isinstance(inputs, (tuple, list)):
        return module(*inputs)
    return module(inputs)


def exact(outputs: Nest) -> Nest:
    """Return outputs whose floating-point tensors are float32 or wider, as losses are computed."""

    def widened(leaf: Any) -> Any:
        """Return a leaf in float32, where it is a narrower floating-point tensor; others as they are."""
        narrow = isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dtype != torch.float64
        return leaf.float() if narrow else leaf

    return map_leaves(widened, outputs)


def zero_of(outputs: Nest) -> Tensor:
    """Return a zero that depends on every floating-point tensor of some outputs: the loss of no samples."""
    sums = [leaf.sum() * 0.0 for leaf in leaves(outputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    total: Tensor = sums[0]
    for each in sums[1:]:
        total = total + each
    return total
