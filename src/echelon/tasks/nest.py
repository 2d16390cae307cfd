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


@dataclass(frozen=True)
class _Container:
    """How nests of a class are taken apart, and put together again with other children like one of them."""

    children: Callable[[Nest], list[Nest]]
    filled: Callable[[Nest, list[Nest]], Nest]


def _filled_dict(like: Nest, children: list[Nest]) -> Nest:
    """Return a dict; of one that is a dataclass too, as transformers' outputs are, another such, with all its keys."""
    kind: Any = type(like)
    filled = dict(zip(like, children, strict=True))
    if not is_dataclass(like):
        return filled
    record = kind(**{field.name: filled[field.name] for field in fields(like) if field.init and field.name in filled})
    for key in filled.keys() - {field.name for field in fields(like)}:
        record[key] = filled[key]
    return record


_DICTS = _Container(lambda nest: list(nest.values()), _filled_dict)
_NAMED_TUPLES = _Container(list, lambda like, children: type(like)(*children))
_SEQUENCES = _Container(list, lambda like, children: type(like)(children))
_DATACLASSES = _Container(
    lambda nest: [getattr(nest, field.name) for field in fields(nest)],
    lambda like, children: replace(like, **{f.name: child for f, child in zip(fields(like), children, strict=True)}),
)


def _taken_apart(kind: type) -> _Container | None:
    """Return how nests of a class are taken apart; None: these are leaves."""
    if issubclass(kind, Mapping):
        return _DICTS
    if issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return _NAMED_TUPLES
    if issubclass(kind, (tuple, list)):
        return _SEQUENCES
    return _DATACLASSES if is_dataclass(kind) and not issubclass(kind, TensorSpec) else None


# Kept, for steps of small models ask it some forty times, and abstract classes take long to answer.
_container: Callable[[type], _Container | None] = cache(_taken_apart)


def is_container(value: Nest) -> bool:
    """Whether a value holds nests, and is no leaf."""
    return _container(type(value)) is not None


def leaves(nest: Nest) -> list[Any]:
    """Return the leaves, in the order of the containers."""
    container = _container(type(nest))
    if container is None:
        return [nest]
    return [leaf for child in container.children(nest) for leaf in leaves(child)]


def leaves_as(like: Nest, nest: Nest) -> list[Any]:
    """Return the leaves of a nest in the order of the containers of another: those of dicts go by their keys.

    Raises:
        ValueError: it has other containers or keys; says which.
    """
    container, own = _container(type(like)), _container(type(nest))
    if container is None:
        if own is not None:
            raise ValueError(f"{len(leaves(nest))} tensors in place of one")
        return [nest]
    if container is _DICTS and own is _DICTS:
        if like.keys() != nest.keys():
            raise ValueError(f"the keys {', '.join(map(str, nest))}, not {', '.join(map(str, like))}")
        return [leaf for key, child in like.items() for leaf in leaves_as(child, nest[key])]
    children, others = container.children(like), [] if own is None else own.children(nest)
    if (container is _DICTS) is not (own is _DICTS) or len(children) != len(others):
        raise ValueError(f"{len(leaves(nest))} tensors in another form than the {len(leaves(like))}")
    return [leaf for a, b in zip(children, others, strict=True) for leaf in leaves_as(a, b)]


def rebuild(like: Nest, values: Iterator[Any]) -> Nest:
    """Return a nest of the same containers as `like`, its leaves taken from `values` in order."""
    container = _container(type(like))
    if container is None:
        return next(values)
    return container.filled(like, [rebuild(child, values) for child in container.children(like)])


def map_leaves(function: Callable[..., Any], nest: Nest, *others: Nest) -> Nest:
    """Return a nest of `function(leaf, leaf of each other nest)`; the others have the first one's containers."""
    container = _container(type(nest))
    if container is None:
        return function(nest, *others)
    if not others:
        return container.filled(nest, [map_leaves(function, child) for child in container.children(nest)])
    values = [function(*row) for row in zip(leaves(nest), *(leaves(other) for other in others), strict=True)]
    return rebuild(nest, iter(values))


def rows(nest: Nest) -> int:
    """Return the number of samples: the length of the first leaf's first axis; 0 of an empty nest."""
    if isinstance(nest, Tensor):
        return nest.shape[0]  # what its `len` is, which takes five times as long
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


def first_sample(nest: Nest) -> Nest:
    """Return the first sample of a nest of tensors, as a batch of one; zeros where there is none."""
    return map_leaves(lambda leaf: leaf[:1] if len(leaf) else leaf.new_zeros((1, *leaf.shape[1:])), nest)


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
    if isinstance(inputs, Tensor):
        return module(inputs)
    if isinstance(inputs, Mapping):
        return module(**inputs)
    if isinstance(inputs, (tuple, list)):
        return module(*inputs)
    return module(inputs)


def logits_in(outputs: Any) -> Any:
    """Return the logits of outputs that are a record or a dict of them, as transformers' are; else these."""
    logits = outputs.get("logits") if isinstance(outputs, Mapping) else getattr(outputs, "logits", None)
    return logits if not isinstance(outputs, Tensor) and isinstance(logits, Tensor) else outputs


def beside(outputs: Any, targets: Nest) -> Any:
    """Return outputs `(B, 1)` as `(B,)` where targets are such; others as they are."""
    if isinstance(outputs, Tensor) and isinstance(targets, Tensor) and outputs.shape == (*targets.shape, 1):
        return outputs.squeeze(-1)
    return outputs


def exact(outputs: Nest) -> Nest:
    """Return outputs whose floating-point tensors are float32 or wider, as losses are computed."""
    return map_leaves(_widened, outputs)


def _widened(leaf: Any) -> Any:
    """Return a leaf in float32, where it is a narrower floating-point tensor; others as they are."""
    if not isinstance(leaf, Tensor) or leaf.dtype in (torch.float32, torch.float64):
        return leaf
    return leaf.float() if leaf.is_floating_point() else leaf


def zero_of(outputs: Nest) -> Tensor:
    """Return a zero that depends on every floating-point tensor of some outputs: the loss of no samples."""
    sums = [leaf.sum() * 0.0 for leaf in leaves(outputs) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    total: Tensor = sums[0]
    for each in sums[1:]:
        total = total + each
    return total
