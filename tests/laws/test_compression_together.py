"""Laws of what a GPU does in one go: several tensors together give what each alone gives, and the same memories.

The functions are called on the CPU, where they are not used: they know nothing of the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from echelon.compression.base import Codec, FusedRounds, Meta, NonFiniteError, State
from echelon.compression.codecs.powersgd import orthonormal_together
from echelon.compression.registry import build, examples

SPECS = [spec for specs in examples().values() for spec in specs]
SPECS += ["topk(0.02, momentum=0.9, nesterov=true)", "topk(0.3)", "threshold(density=0.01, momentum=0.9)"]
EXACT = ("topk", "threshold", "randomk", "fp16", "bf16", "none")  # others add in another order, or round what was added
SIZES = {"alike": (70_000,) * 3, "one longer": (70_001, 70_000, 70_000), "short": (5, 4, 4), "ragged": (300, 7, 4097)}


def _gradients(sizes: Sequence[int], seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(size, generator=generator) ** 3 for size in sizes]


def _states(codec: Codec, like: Sequence[Tensor]) -> list[State]:
    return [codec.init_state(f"w{i}", tensor, 3, 1) for i, tensor in enumerate(like)]


def _same(spec: str, one: Tensor, other: Tensor) -> None:
    if spec.startswith(EXACT):
        assert torch.equal(one, other)
    else:
        far = (one - other).abs() > 1e-5 * (1 + other.abs().max())
        assert float(far.sum()) <= 1e-3 * far.numel()


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("spec", SPECS)
def test_several_are_encoded_and_decoded_as_each_alone(spec: str, sizes: tuple[int, ...]) -> None:
    codec = build(spec)
    alone, together = (_states(codec, _gradients(sizes, 0)) for _ in range(2))
    for step in range(4):
        gradients = _gradients(sizes, step)
        metas = [Meta.of(g) for g in gradients]
        single = [codec.compress(g, s) for g, s in zip(gradients, alone, strict=True)]
        wanted = [codec.extract(payload) for payload in single]
        payloads = codec.compress_together(gradients, together)
        buffers = [codec.to_bytes(payload) for payload in payloads]
        assert [payload.n_bytes for payload in payloads] == [len(buffer) for buffer in buffers]
        if "huffman" not in spec:  # whether symbols are coded depends on the clock
            assert [len(buffer) for buffer in buffers] == [payload.n_bytes for payload in single]
        outs = [torch.full_like(g, math.nan) for g in gradients]
        codec.extract_together(codec.from_bytes_together(buffers, metas), outs)
        for out, value in zip(outs, wanted, strict=True):
            _same(spec, out, value)
        for first, second in zip(alone, together, strict=True):
            assert first.step == second.step
            for key, memory in first.elementwise.items():
                _same(spec, second.elementwise[key], memory)


@pytest.mark.parametrize("spec", SPECS)
def test_several_are_added_as_one_after_the_other(spec: str) -> None:
    codec, gradients = build(spec), _gradients((70_000,) * 3, 1)
    payloads = codec.compress_together(gradients, _states(codec, gradients))
    one, other = torch.ones(70_000), torch.ones(70_000)
    codec.add_together(one, payloads)
    for payload in payloads:
        codec.add_to(other, payload)
    _same(spec, one, other)


@pytest.mark.parametrize("spec", [s for s in SPECS if s != "none"])
def test_one_that_is_not_finite_is_refused(spec: str) -> None:
    codec, gradients = build(spec), _gradients((70_000,) * 3, 1)
    gradients[1][69_999] = math.inf
    with pytest.raises(NonFiniteError):
        codec.compress_together(gradients, _states(codec, gradients))


@pytest.mark.parametrize("spec", ["topk(0.01)", "threshold(density=0.01)", "topk(0.02, values=sign)"])
def test_a_damaged_message_among_several_is_refused(spec: str) -> None:
    codec, gradients = build(spec), _gradients((70_000,) * 3, 1)
    buffers = [codec.to_bytes(payload) for payload in codec.compress_together(gradients, _states(codec, gradients))]
    metas = [Meta.of(g) for g in gradients]
    for damaged in (buffers[1][: len(buffers[1]) // 2 // 8 * 8], torch.zeros_like(buffers[1])):
        with pytest.raises(ValueError, match="message"):
            read = codec.from_bytes_together([buffers[0], damaged, buffers[2]], metas)
            codec.extract_together(read, [torch.empty_like(g) for g in gradients])


@pytest.mark.parametrize("spec", [s for s in SPECS if build(s).linear])
def test_several_are_reduced_as_each_alone(spec: str) -> None:
    """The rounds of several workers' tensors together: the same means, and the same is left in memories."""
    codec, shapes = build(spec), [(60, 40), (17,), (8, 3, 5, 5), (40, 60)]
    likes = [torch.empty(shape) for shape in shapes]
    alone, together = ([_states(codec, likes) for _ in range(2)] for _ in range(2))
    for step in range(4):
        made = [[torch.randn(s, generator=torch.Generator().manual_seed(7 * step + w)) for s in shapes] for w in (0, 1)]
        wanted = _reduced([codec.reduce_parts(g, s) for g, s in zip(made, alone, strict=True)])
        found = _reduced([codec.reduce_together(g, s) for g, s in zip(made, together, strict=True)])
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        for first, second in zip(alone[0] + alone[1], together[0] + together[1], strict=True):
            assert first.step == second.step
            for key, memory in first.elementwise.items():
                torch.testing.assert_close(second.elementwise[key], memory, rtol=1e-4, atol=1e-4)


def _reduced(workers: list[FusedRounds]) -> list[Tensor]:
    sent = [next(one) for one in workers]
    results: list[list[Tensor]] = []
    while not results:
        mean, following = torch.stack(sent).mean(dim=0, dtype=torch.float64).to(sent[0].dtype), []
        for one in workers:
            try:
                following.append(one.send(mean.clone()))
            except StopIteration as stop:
                results.append(stop.value)
        sent = following
    return results[0]


def test_orthonormal_columns_are_those_of_qr_whatever_the_heights() -> None:
    generator = torch.Generator().manual_seed(0)
    matrices = [torch.randn(n, 3, generator=generator) * 10.0**power for n, power in ((50, 0), (7, -12), (200, 12))]
    matrices += [torch.zeros(9, 3), torch.ones(30, 3), torch.full((20, 3), 2e-38)]
    for p, q in zip(matrices, orthonormal_together(matrices), strict=True):
        assert q.shape == p.shape
        torch.testing.assert_close(q.t() @ q, torch.eye(3), atol=1e-5, rtol=0)
        torch.testing.assert_close(q @ (q.t() @ p), p, rtol=1e-4, atol=1e-5 * float(p.abs().max()))
    wanted = torch.linalg.qr(matrices[0]).Q
    torch.testing.assert_close((orthonormal_together(matrices)[0] * wanted).sum(dim=0).abs(), torch.ones(3))
