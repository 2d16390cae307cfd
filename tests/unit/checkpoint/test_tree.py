"""What a state may hold, and that it comes back bit for bit."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from echelon.checkpoint import CheckpointStore
from echelon.checkpoint.tree import _DTYPES, flatten, unflatten
from tests.unit.checkpoint.states import assert_same

TEXT = st.text(st.sampled_from('ab.#"\\\n\0ü😀\ud800'), max_size=5)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | TEXT
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(TEXT | st.integers(), inner),
    max_leaves=20,
)


def through_disk(folder: Path, state: dict[str, Any]) -> Any:
    store = CheckpointStore(folder, keep=1)
    store.save(0, state, background=False)
    store.close()
    newest = store.newest()
    assert newest is not None
    return newest[1]


@settings(max_examples=60)
@given(st.dictionaries(TEXT | st.integers(), VALUES))
def test_any_tree_of_scalars_comes_back(state: dict[Any, Any]) -> None:
    tree, tensors = flatten(state)
    assert_same(state, unflatten(json.loads(json.dumps(tree, allow_nan=False)), tensors))


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
def test_any_dtype_and_shape_comes_back_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    random_bytes = torch.randint(0, 256, (6 * dtype.itemsize,), dtype=torch.uint8)
    vector = random_bytes > 127 if dtype is torch.bool else random_bytes.view(dtype)
    vector = vector[:6]
    matrix = vector.reshape(2, 3)
    state = {"vector": vector, "scalar": vector[1], "empty": vector[:0].reshape(0, 3), "gaps": vector[::2]}
    state |= {"transposed": matrix.t(), "column": matrix[:, 1], "repeated": vector[:1].expand(4, 1)}
    assert_same(state, through_disk(tmp_path, state))


def test_memory_order_is_kept(tmp_path: Path) -> None:
    image = torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    back = through_disk(tmp_path, {"image": image, "transposed": torch.randn(3, 2).t()})
    assert back["image"].stride() == image.stride()
    assert back["transposed"].stride() == (1, 2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="copies from a GPU need one")
def test_tensors_on_a_gpu_come_back_on_the_cpu(tmp_path: Path) -> None:
    matrix = torch.randn(300, 400, device="cuda")
    image = torch.randn(2, 3, 40, 50, device="cuda").contiguous(memory_format=torch.channels_last)
    state = {"matrix": matrix, "transposed": matrix.t(), "gaps": matrix[:, ::3], "image": image, "step": matrix[0, 0]}
    expected = {name: tensor.cpu() for name, tensor in state.items()}
    store = CheckpointStore(tmp_path, keep=1)
    store.save(0, state)
    for tensor in state.values():
        tensor.zero_()
    store.close()
    newest = store.newest()
    assert newest is not None
    assert_same(expected, newest[1])


def test_names_of_any_characters_stay_apart(tmp_path: Path) -> None:
    names = ["a.b", "", ".", "/", "../x", "__metadata__", "ü\n\0", "\ud800", "a.b#2", "weight\\ud800"]
    state: dict[str, Any] = {name: torch.tensor(i) for i, name in enumerate(names)}
    state["a"] = {"b": torch.tensor(100), 1: torch.tensor(101), "1": torch.tensor(102)}
    assert_same(state, through_disk(tmp_path, state))


def test_special_floats_and_a_state_without_tensors(tmp_path: Path) -> None:
    floats = [float("nan"), float("inf"), -float("inf"), -0.0, 5e-324, 0.1, 1.0, 1e308]
    assert_same({"floats": floats}, through_disk(tmp_path, {"floats": floats}))
    assert_same({}, through_disk(tmp_path, {}))


def test_rng_states_come_back(tmp_path: Path) -> None:
    state = {"python": random.getstate(), "torch": torch.get_rng_state()}
    back = through_disk(tmp_path, state)
    assert_same(state, back)
    random.setstate(back["python"])
    torch.set_rng_state(back["torch"])


def test_tied_parameters_and_conjugates(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.randn(2, 2))
    conjugate = torch.randn(3, dtype=torch.complex64).conj()
    back = through_disk(tmp_path, {"a": weight, "b": weight, "part": weight[0], "c": conjugate})
    expected = {"a": weight.detach(), "b": weight.detach(), "part": weight[0].detach(), "c": conjugate.resolve_conj()}
    assert_same(expected, back)


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"a": {"b": b"bytes"}}, r"a\.b is a bytes: a checkpoint holds only dicts"),
        ({"a": [object()]}, r"a\.0 is a object"),
        ({"a": {1.5: 1}}, r"key 1\.5 of a: a checkpoint's keys are strings or integers"),
        ({"a": torch.zeros(2).to_sparse()}, "a is a Tensor on cpu: only plain dense tensors"),
        ({"a": torch.zeros(2, device="meta")}, "a is a Tensor on meta"),
        ([1], "a state is a dict, not list"),
    ],
)
def test_other_values_are_refused_with_their_place(state: Any, words: str) -> None:
    with pytest.raises(TypeError, match=words):
        flatten(state)
