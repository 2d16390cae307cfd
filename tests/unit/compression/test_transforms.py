"""Error feedback, the worker's momentum, and a change of the worker count."""

from __future__ import annotations

import pytest
import torch

from echelon.compression.base import Codec
from echelon.compression.registry import build
from echelon.compression.transforms import (
    ErrorFeedback,
    LocalClip,
    MomentumCorrection,
    Transformed,
    resize,
    without_transforms,
)


def unwrapped(codec: Codec) -> Codec:
    assert isinstance(codec, Transformed)
    return codec.inner


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_correction_is_momentum_while_everything_is_sent(nesterov: bool) -> None:
    """At density 1 nothing waits and nothing is masked: the messages are SGD's momentum buffer, or Nesterov's step."""
    codec = build(f"topk(1.0, momentum=0.9, values=fp32, nesterov={nesterov})")
    state, buffer = codec.init_state("w", torch.empty(500)), torch.zeros(500)
    for step in range(4):
        gradient = torch.randn(500, generator=torch.Generator().manual_seed(step))
        buffer = 0.9 * buffer + gradient
        sent = codec.extract(codec.compress(gradient, state))
        wanted = gradient + 0.9 * buffer if nesterov else buffer
        assert torch.allclose(sent, wanted, rtol=1e-6, atol=1e-6)


def test_masking_zeroes_momentum_where_sent_and_only_when_sparse() -> None:
    gradient = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    for spec, masked in (("topk(0.01, momentum=0.9)", True), ("topk(0.2, momentum=0.9)", False)):
        codec = build(spec)
        state = codec.init_state("w", gradient)
        sent = codec.extract(codec.compress(gradient, state)) != 0
        assert bool((state.elementwise["velocity"][sent] == 0).all()) == masked
        assert torch.equal(state.elementwise["velocity"][~sent], gradient[~sent])


def test_local_clipping_limits_the_norm_that_enters() -> None:
    codec = build("topk(1.0, clip=2.0, values=fp32)")
    gradient = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    sent = codec.extract(codec.compress(gradient, codec.init_state("w", gradient)))
    assert float(sent.norm()) == pytest.approx(2.0, rel=1e-5)
    small = gradient / gradient.norm()
    assert torch.equal(codec.extract(codec.compress(small, codec.init_state("w", small))), small)


def test_density_warms_up_in_stages() -> None:
    codec = unwrapped(build("topk(0.01, warmup_steps=30)"))
    state = codec.init_state("w", torch.empty(10_000))
    gradient = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    counts = []
    for _ in range(32):
        counts.append(int((codec.extract(codec.compress(gradient, state)) != 0).sum()))
    assert [counts[i] for i in (0, 9, 10, 20, 30)] == pytest.approx([3162, 3162, 1000, 316, 100], abs=1)


def test_the_way_back_has_no_momentum_and_its_own_error() -> None:
    codec = build("topk(0.01, momentum=0.9, clip=1.0)+huffman")
    back = codec.relay()
    assert codec.absorbs_momentum == 0.9 and back.absorbs_momentum is None and back.local_clip == 0
    assert set(back.init_state("w", torch.empty(100)).elementwise) == {"error"}
    assert set(codec.init_state("w", torch.empty(100)).elementwise) == {"error", "velocity"}


@pytest.mark.parametrize(
    "spec", ["topk(0.5)", "threshold(density=0.5)", "threshold(tau=1.0)", "topk(0.5, values=sign)"]
)
def test_the_largest_floats_do_not_become_infinite(spec: str) -> None:
    """Rounded to bfloat16 they would; error feedback would never be rid of it."""
    codec = build(spec)
    huge = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    huge[::100] = torch.finfo(torch.float32).max * torch.tensor([1, -1] * 5)
    state = codec.init_state("w", huge)
    decoded = codec.extract(codec.compress(huge, state))
    assert bool(decoded.isfinite().all()) and bool(state.elementwise["error"].isfinite().all())
    assert torch.allclose(decoded + state.elementwise["error"], huge, rtol=1e-6, atol=1e31)


def test_memory_is_kept_in_place() -> None:
    """A hook may let a state's memory be a view of a larger tensor."""
    codec = build("sign")
    state, whole = codec.init_state("w", torch.empty(100)), torch.zeros(300)
    state.elementwise["error"] = whole[100:200]
    codec.compress(torch.randn(100, generator=torch.Generator().manual_seed(0)), state)
    assert bool(whole[100:200].any()) and not whole[:100].any() and not whole[200:].any()


def test_transforms_compose_around_any_codec() -> None:
    """What nobody's spec asks for works too: clipping, momentum and error feedback around an unbiased quantiser."""
    codec = Transformed(build("int8"), (LocalClip(5.0), MomentumCorrection(0.5), ErrorFeedback()))
    state = codec.init_state("w", torch.empty(300))
    sent, velocity, entered = torch.zeros(300), torch.zeros(300), torch.zeros(300)
    for step in range(5):
        gradient = torch.randn(300, generator=torch.Generator().manual_seed(step))
        velocity = 0.5 * velocity + gradient * min(1.0, 5.0 / float(gradient.norm()))
        entered += velocity
        sent += codec.extract(codec.compress(gradient, state))
    assert torch.allclose(sent + state.elementwise["error"], entered, atol=1e-5)
    assert torch.allclose(state.elementwise["velocity"], velocity, atol=1e-6)
    assert without_transforms(codec) == build("int8")


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
def test_a_changed_worker_count_keeps_the_sum(workers: int) -> None:
    codec = build("topk(0.01, momentum=0.9)")
    states = [codec.init_state("w", torch.empty(40, 30), stream=rank) for rank in range(4)]
    for rank, state in enumerate(states):
        for step in range(3):
            codec.compress(torch.randn(40, 30, generator=torch.Generator().manual_seed(10 * rank + step)), state)
    new = resize([state.state_dict() for state in states], workers)
    assert len(new) == workers
    for key in ("memory.error", "memory.velocity"):
        before = sum(torch.as_tensor(s.state_dict()[key]).double() for s in states)
        after = sum(torch.as_tensor(s[key]).double() for s in new)
        assert torch.allclose(torch.as_tensor(before), torch.as_tensor(after), rtol=0, atol=1e-6)
    fresh = codec.init_state("w", torch.empty(40, 30))
    fresh.load_state_dict(new[-1])
    assert fresh.step == 3
