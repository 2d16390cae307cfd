"""Torch's private names: all in one module, and all there in the torch that is installed."""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import echelon
from echelon import torch_compat
from echelon.core.system import COMPILER

PACKAGE = Path(echelon.__file__).parent
KNOWERS = {PACKAGE / "torch_compat.py", PACKAGE / "core" / "system.py"}
ATTRIBUTES = {
    "_modules", "_non_persistent_buffers_set", "_local_tensor", "_get_backend", "_cdata", "_schema", "_conv_forward",
    "_comm_hooks", "_concatenate", "_step_supports_amp_scaling", "_no_grad_trunc_normal_",
    "_set_params_and_buffers_to_ignore_for_model", "_orig_mod", "_step_microbatches", "_merge_outputs",
}  # fmt: skip


def _private(name: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in name.split("."))


def _uses(tree: ast.Module) -> Iterator[str]:
    """Yield what a module imports from torch, or reads of its objects, under a private name, or has as a string."""
    of_torch = {"torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            of_torch |= {a.asname or a.name for a in node.names}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            yield from (name for a in node.names if _private(name := f"{node.module}.{a.name}"))
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.startswith("torch.") and _private(a.name))
        elif isinstance(node, ast.Attribute):
            name = ast.unparse(node)
            named = re.fullmatch(r"[\w.]+", name) and name.partition(".")[0] in of_torch and _private(name)
            if named or node.attr in ATTRIBUTES:
                yield name
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):  # for getattr, import_module, loggers
            name = node.value.strip(".")
            if name in ATTRIBUTES or (re.fullmatch(r"torch(\.\w+)+", name) and _private(name)):
                yield name


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_other_module_knows_private_names_of_torch(path: Path) -> None:
    if path not in KNOWERS:
        assert not [*_uses(ast.parse(path.read_text()))]


@pytest.mark.parametrize(
    "text",
    [
        "from torch._guards import detect_fake_mode",
        "import torch._dynamo",
        "torch._foreach_norm([])",
        "operator._schema",
        "hasattr(operator, '_schema')",
        "name.removeprefix('_orig_mod.')",
        "MODULES = ('torch', 'torch._dynamo')",
    ],
)
def test_every_way_to_use_a_private_name_is_seen(text: str) -> None:
    assert [*_uses(ast.parse(text))]
    assert not [*_uses(ast.parse(text.replace("._", ".").replace("'_", "'")))]


@pytest.mark.parametrize("name", torch_compat.__all__)
def test_this_torch_has_every_name(name: str) -> None:
    assert getattr(torch_compat, name) is not None
    assert torch_compat.fake_store() is not None
    assert torch_compat.strided_shard(0, 2).dim == 0  # type: ignore[attr-defined]
    assert importlib.util.find_spec(COMPILER) is not None


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU, nn.Linear])
def test_recurrent_layers_are_not_those_of_cudnn_where_backward_follows_evaluation(kind: type[nn.Module]) -> None:
    with torch_compat.backward_in_evaluation([nn.Sequential(kind(2, 2))]):
        assert torch.backends.cudnn.enabled == (kind is nn.Linear)
    assert torch.backends.cudnn.enabled


def test_a_copy_has_the_tensors_and_children_that_it_is_given() -> None:
    layer = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    copied = torch_compat.copy_with(layer, {"0": layer[0]}, {})
    assert [name for name, _ in copied.named_children()] == ["0"] and len(layer) == 2
    norm = torch_compat.copy_with(layer[1], {}, {"running_mean": layer[1].running_mean})
    assert [*norm.state_dict()] == ["running_mean"] and torch.equal(norm.running_mean, torch.zeros(2))
    assert torch_compat.is_persistent(layer[1], "running_mean")
