"""States to save, and a comparison that looks at bits."""

from __future__ import annotations

import struct
from typing import Any

import torch
from torch import Tensor

from echelon.checkpoint.tensors import as_bytes


def small_state(fill: float = 1.0) -> dict[str, Any]:
    """A state like that of a run, small enough to be damaged at every byte."""
    return {
        "model": {"weight": torch.full((3, 2), fill), "bias": torch.arange(3).to(torch.bfloat16)},
        "optimizer": {"state": {0: {"step": torch.tensor(7.0), "momentum": torch.randn(2, 2)}}, "lr": 0.1},
        "cursor": (3, 128),
        "fingerprint": "a1b2",
        "scaler": None,
    }


def assert_same(a: Any, b: Any, where: str = "state") -> None:
    """Fail unless both have the same structure, types and bits."""
    assert type(a) is type(b), where
    if isinstance(a, dict):
        assert list(a) == list(b), where
        for key in a:
            assert_same(a[key], b[key], f"{where}.{key}")
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b), where
        for i, (x, y) in enumerate(zip(a, b)):
            assert_same(x, y, f"{where}.{i}")
    elif isinstance(a, Tensor):
        assert (a.dtype, a.shape) == (b.dtype, b.shape), where
        assert torch.equal(as_bytes(a), as_bytes(b)), where
    elif isinstance(a, float):
        assert struct.pack("d", a) == struct.pack("d", b), where
    else:
        assert a == b, where
