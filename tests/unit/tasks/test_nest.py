"""Containers keep their kinds, whatever is made of their leaves."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from echelon.tasks import nest
from echelon.tasks.nest import TensorSpec


class _Pair(NamedTuple):
    a: Any
    b: Any


@dataclass(frozen=True)
class _Outputs:
    logits: Any
    hidden: Any = ()


@dataclass
class _Record(OrderedDict[str, Any]):
    """A dict whose values are attributes too, as outputs of transformers are."""

    logits: Any = None
    hidden: Any = None

    def __post_init__(self) -> None:
        self.update({key: getattr(self, key) for key in ("logits", "hidden") if getattr(self, key) is not None})


ONE, TWO = torch.zeros(3, 1), torch.ones(3, 2)


@pytest.mark.parametrize(
    ("value", "leaves"),
    [
        (ONE, [ONE]),
        ((ONE, [TWO]), [ONE, TWO]),
        ({"b": TWO, "a": (ONE, TWO)}, [TWO, ONE, TWO]),
        (OrderedDict(a=ONE), [ONE]),
        (_Pair(ONE, {"c": TWO}), [ONE, TWO]),
        (_Outputs(ONE, (TWO, ONE)), [ONE, TWO, ONE]),
        (_Record(ONE), [ONE]),
        (((), ONE), [ONE]),
        ((), []),
    ],
)
def test_leaves_come_in_the_containers_order_and_go_back_into_them(value: nest.Nest, leaves: list[Tensor]) -> None:
    found = nest.leaves(value)
    assert len(found) == len(leaves) and all(a is b for a, b in zip(found, leaves, strict=True))
    for same in (nest.map_leaves(lambda leaf: leaf, value), nest.rebuild(value, iter(leaves))):
        assert type(same) is (dict if type(value) is OrderedDict else type(value))
        assert all(a is b for a, b in zip(nest.leaves(same), leaves, strict=True))
    assert nest.rows(value) == (3 if leaves else 0)


def test_outputs_whose_values_are_attributes_have_them_in_float32() -> None:
    exact = nest.exact(_Record(ONE.bfloat16(), hidden=(TWO,)))
    assert exact.logits.dtype == exact["logits"].dtype == torch.float32 and exact.hidden[0] is TWO


def test_outputs_whose_values_are_attributes_may_have_keys_of_the_users_own() -> None:
    record = _Record(ONE.bfloat16())
    record["auxiliary"] = TWO.bfloat16()
    exact = nest.exact(record)
    assert isinstance(exact, _Record) and exact["auxiliary"].dtype == exact.logits.dtype == torch.float32


def test_specs_and_classes_are_leaves() -> None:
    assert not any(map(nest.is_container, (TensorSpec((3,)), _Outputs, "text", None, 1.0)))


def test_several_nests_are_mapped_leaf_by_leaf() -> None:
    summed = nest.map_leaves(torch.add, {"a": ONE, "b": ONE + 1}, {"a": ONE + 2, "b": ONE})
    assert [float(leaf.sum()) for leaf in summed.values()] == [6.0, 3.0]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_cut_batches_hold_each_sample_once(count: int) -> None:
    batch = {"x": torch.arange(6).view(3, 2), "y": (torch.arange(3),)}
    parts = nest.tensor_split(batch, count)
    assert len(parts) == count and sum(map(nest.rows, parts)) == 3
    assert torch.equal(torch.cat([part["y"][0] for part in parts]), torch.arange(3))
    assert all(len(part["x"]) == len(part["y"][0]) for part in parts)
