"""Codecs on a CUDA device: the same results as on the CPU."""

from __future__ import annotations

import pytest
import torch

from echelon.compression.base import Meta
from echelon.compression.registry import build

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SPECS = [
    "none",
    "fp16",
    "bf16",
    "int8",
    "int8(block=100)",
    "qsgd",
    "ternary",
    "sign",
    "sign(vote=true)",
    "threshold(tau=2.0)",
    "threshold(density=0.01)",
    "topk(0.01)",
    "topk(0.01, momentum=0.9)",
    "topk(0.02, values=sign)",
    "randomk(0.01)",
    "powersgd(rank=2)",
    "qsgd+huffman",
    "topk(0.01)+huffman",
]


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("shape", [(), (0,), (300, 700)])
def test_same_as_on_the_cpu(spec: str, shape: tuple[int, ...]) -> None:
    codec = build(spec)
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    decoded = {}
    for device in ("cpu", "cuda"):
        there = tensor.to(device)
        state = codec.init_state("w", there)
        for _ in range(2):
            payload = codec.compress(there, state)
        assert all(t.device.type == device for t in payload.tensors)
        buffer = codec.to_bytes(payload)
        decoded[device] = codec.extract(codec.from_bytes(buffer, Meta.of(there))).cpu()
    # Sums and products may round differently: a code may then differ by one level in rare elements.
    differing = (decoded["cpu"] - decoded["cuda"]).abs() > 1e-4 * tensor.abs().max() if tensor.numel() else tensor != 0
    assert float(differing.float().sum()) <= 1e-3 * tensor.numel()
