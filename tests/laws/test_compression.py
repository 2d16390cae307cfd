"""What every codec obeys, over the registry: a new codec is tested by existing, with its `examples`."""

from __future__ import annotations

import math
from functools import cache

import pytest
import torch
from torch import Tensor

from echelon.compression.base import Codec, Meta, NonFiniteError, Payload, Rounds, State
from echelon.compression.quantiser import Quantiser
from echelon.compression.registry import build, examples

SPECS = [spec for specs in examples().values() for spec in specs]
CODECS = {spec: build(spec) for spec in SPECS}
BIASED = [spec for spec, codec in CODECS.items() if codec.biased]
CLIPPED = ["ternary"]
UNBIASED = [spec for spec, codec in CODECS.items() if isinstance(codec, Quantiser) and spec not in CLIPPED]
# Those that change the gradient before encoding are tested in tests/unit/compression.
PLAIN_ERROR = [s for s in BIASED if not CODECS[s].absorbs_momentum and not CODECS[s].local_clip]
LINEAR = [spec for spec, codec in CODECS.items() if codec.linear]
SPARSE = [s for s in SPECS if s.startswith(("topk", "threshold")) and "huffman" not in s]
SHAPES = [(), (0,), (1,), (7,), (8, 0), (3, 5), (40, 3, 5, 5), (257, 129)]


def gradient(shape: tuple[int, ...], seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """A gradient with tails heavier than a normal distribution's, as real ones have."""
    return _drawn(shape, seed).to(dtype, copy=True)


@cache
def _drawn(shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(shape, generator=generator, dtype=torch.float64)
    return normal * normal.abs().sqrt()


def send(codec: Codec, tensor: Tensor, state: State) -> tuple[Payload, Tensor]:
    """Encode, carry the bytes over, decode."""
    payload = codec.compress(tensor, state)
    buffer = codec.to_bytes(payload)
    assert buffer.numel() == payload.n_bytes
    return payload, codec.extract(codec.from_bytes(buffer, Meta.of(tensor)))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("shape", SHAPES)
def test_any_shape_comes_back(spec: str, shape: tuple[int, ...]) -> None:
    codec = build(spec)
    tensor = gradient(shape)
    state = codec.init_state("layer.weight", tensor)
    payload, decoded = send(codec, tensor, state)
    assert decoded.shape == tensor.shape and decoded.dtype == tensor.dtype
    assert torch.isfinite(decoded).all()
    into = torch.full_like(tensor, 7.0)
    assert torch.equal(codec.extract(payload, into), decoded) and torch.equal(into, decoded)
    known = codec.n_bytes(tensor.numel())
    assert known in (None, payload.n_bytes)
    assert codec.fixed_size == (known is not None)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_any_float_dtype_comes_back(spec: str, dtype: torch.dtype) -> None:
    codec = build(spec)
    tensor = gradient((60, 50), dtype=dtype)
    _, decoded = send(codec, tensor, codec.init_state("w", tensor))
    assert decoded.dtype == dtype and decoded.shape == tensor.shape
    total = torch.zeros(tensor.shape)
    state = codec.init_state("w", tensor)
    codec.add_to(total, codec.compress(tensor, state), alpha=2.0)
    assert torch.allclose(total, 2.0 * decoded.float(), rtol=0.02, atol=1e-3)


@pytest.mark.parametrize("spec", PLAIN_ERROR)
def test_nothing_is_lost(spec: str) -> None:
    """decode(encode(x)) + kept error = x, over several steps: what was put in, less what came out, is in the memory."""
    codec = build(spec)
    state = codec.init_state("w", torch.empty(120, 100))
    put_in, came_out = torch.zeros(120, 100, dtype=torch.float64), torch.zeros(120, 100, dtype=torch.float64)
    for step in range(5):
        tensor = gradient((120, 100), seed=step)
        put_in += tensor
        came_out += send(codec, tensor, state)[1]
    # Each of the five float32 additions rounds once: half a unit in the last place of values up to about 64.
    kept = state.elementwise["error"].view(120, 100)
    assert torch.allclose(came_out + kept, put_in, rtol=0, atol=5 * 64 * 2**-24)


@pytest.mark.parametrize("spec", PLAIN_ERROR)
def test_nothing_is_lost_to_the_bit(spec: str) -> None:
    """One step: where the kept error is representable, the sum is exact; it is within a rounding everywhere."""
    codec = build(spec)
    tensor = gradient((3000,))
    state = codec.init_state("w", tensor)
    decoded = send(codec, tensor, state)[1]
    back = decoded.double() + state.elementwise["error"].double()
    rounding = 2.0**-24 * torch.maximum(decoded.abs(), tensor.abs()).double()
    assert bool(((back - tensor).abs() <= rounding).all())
    sparse = spec.startswith(("topk", "threshold", "randomk")) and "sign" not in spec
    assert not sparse or torch.equal(back, tensor.double())


@pytest.mark.parametrize("spec", UNBIASED)
def test_unbiased(spec: str) -> None:
    """The mean of 800 decodings is x, for each of 1,000 elements.

    Decodings of an element take two values a step apart, so by Hoeffding's inequality a correct codec exceeds the
    tolerance anywhere with probability below 1e-6; the state is seeded, so the outcome is fixed besides.
    """
    codec, tensor, draws = build(spec), gradient((1000,)), 800
    assert isinstance(codec, Quantiser)
    state = codec.init_state("w", tensor)
    mean = sum(codec.extract(codec.compress(tensor, state)).double() for _ in range(draws)) / draws
    step = float(tensor.abs().max()) / codec.grid.levels
    tolerance = step * math.sqrt(math.log(2 * 1000 / 1e-6) / (2 * draws))
    assert float((mean - tensor).abs().max()) < tolerance


@pytest.mark.parametrize("spec", CLIPPED)
def test_clipping_is_all_that_ternary_is_biased_by(spec: str) -> None:
    """The mean of decodings is the clipped x; tolerance and error rate as above."""
    codec, tensor, draws = build(spec), gradient((1000,)), 800
    state = codec.init_state("w", tensor)
    mean = sum(codec.extract(codec.compress(tensor, state)).double() for _ in range(draws)) / draws
    blocks = [
        b.clamp(-2.5 * float(b.square().mean().sqrt()), 2.5 * float(b.square().mean().sqrt()))
        for b in tensor.split(512)
    ]
    clipped = torch.cat(blocks).double()
    assert 0 < float((clipped - tensor).norm() / tensor.norm()) < 0.2
    tolerance = float(clipped.abs().max()) * math.sqrt(math.log(2 * 1000 / 1e-6) / (2 * draws))
    assert float((mean - clipped).abs().max()) < tolerance


@pytest.mark.parametrize("spec", SPARSE)
@pytest.mark.parametrize("shape", [(32, 32), (128, 64), (7,)])
def test_bytes_of_small_tensors_are_as_predicted(spec: str, shape: tuple[int, ...]) -> None:
    """What a sparse message has beside its values counts there: lengths and padding."""
    codec = build(spec)
    state = codec.init_state("w", torch.empty(shape))
    for step in range(3):
        payload = codec.compress(gradient(shape, seed=step), state)
        numel = math.prod(shape)
        if "warmup" not in spec:
            assert 8 * payload.n_bytes / numel == pytest.approx(codec.bits_per_element(numel, state), rel=0.05)


@pytest.mark.parametrize("spec", SPECS)
def test_bytes_are_as_predicted(spec: str) -> None:
    """Bytes are within 5% of `bits_per_element` for 120,000 elements: a message by its state, the mean beforehand."""
    codec = build(spec)
    shape = (400, 300)
    state = codec.init_state("w", torch.empty(shape))
    sent = []
    for step in range(40 if "threshold" in spec else 12):
        payload = codec.compress(gradient(shape, seed=step), state)
        sent.append(payload.n_bytes)
    predicted = codec.bits_per_element(120_000, state)
    assert 8 * payload.n_bytes / 120_000 == pytest.approx(predicted, rel=0.05)
    beforehand = codec.bits_per_element(120_000)
    if not (math.isnan(beforehand) or "warmup" in spec or "huffman" in spec):
        mean = sum(sent[-10:]) / 10
        assert 8 * mean / 120_000 == pytest.approx(beforehand, rel=0.05)


@pytest.mark.parametrize("spec", SPECS)
def test_same_seed_same_bytes(spec: str) -> None:
    def messages(seed: int) -> list[Tensor]:
        codec = build(spec)
        state = codec.init_state("w", torch.empty(90, 70), seed=seed)
        return [codec.to_bytes(codec.compress(gradient((90, 70), seed=step), state)) for step in range(3)]

    for one, other in zip(messages(3), messages(3), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("spec", SPECS)
def test_state_survives_a_restart(spec: str) -> None:
    """A state that is saved and loaded continues with the same bytes; loading is in place."""
    codec = build(spec)
    state = codec.init_state("w", torch.empty(90, 70), seed=1)
    for step in range(3):
        codec.compress(gradient((90, 70), seed=step), state)
    saved = {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.state_dict().items()}
    assert all(isinstance(v, Tensor | int | float) for v in saved.values())
    restored = codec.init_state("w", torch.empty(90, 70), seed=1)
    views = dict(restored.elementwise)
    restored.load_state_dict(saved)
    assert all(restored.elementwise[k] is view for k, view in views.items())
    tensor = gradient((90, 70), seed=9)
    assert torch.equal(codec.to_bytes(codec.compress(tensor, state)), codec.to_bytes(codec.compress(tensor, restored)))
    other = codec.init_state("w", torch.empty(91, 70), seed=1)
    if other.elementwise or other.factors:
        with pytest.raises(ValueError, match="does not fit"):
            other.load_state_dict(saved)


@pytest.mark.parametrize("spec", [s for s in SPECS if s != "none"])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 70_001])
def test_nan_and_infinity_are_refused_by_name(spec: str, bad: float, at: int) -> None:
    codec = build(spec)
    tensor = gradient((300, 300))
    state = codec.init_state("stem.conv.weight", tensor)
    codec.compress(tensor, state)
    before = {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.state_dict().items()}
    broken = tensor.clone()
    broken.view(-1)[at] = bad
    with pytest.raises(NonFiniteError, match=r"stem\.conv\.weight"):
        codec.compress(broken, state)
    for key, value in state.state_dict().items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(before[key])), key


@pytest.mark.parametrize("spec", SPECS)
def test_a_damaged_message_is_refused(spec: str) -> None:
    """A message cut short is an error, never a silent wrong tensor or a read beyond the buffer."""
    codec = build(spec)
    tensor = gradient((64, 64))
    buffer = codec.to_bytes(codec.compress(tensor, codec.init_state("w", tensor)))
    with pytest.raises(ValueError, match="message"):
        codec.extract(codec.from_bytes(buffer[: buffer.numel() // 2 // 8 * 8], Meta.of(tensor)))


@pytest.mark.parametrize("spec", [s for s in SPECS if s not in LINEAR])
def test_others_refuse_to_be_averaged_in_rounds(spec: str) -> None:
    codec = build(spec)
    with pytest.raises(TypeError, match="not linear"):
        next(codec.reduce_rounds(gradient((4,)), codec.init_state("w", torch.empty(4))))


@pytest.mark.parametrize("spec", LINEAR)
def test_linear_codecs_average_as_they_decode(spec: str) -> None:
    """`reduce_rounds` over three workers: all get the same mean, and what is not sent stays in their memories."""
    codec = build(spec)
    shape = (60, 40)
    states = [codec.init_state("w", torch.empty(shape), seed=5, stream=rank) for rank in range(3)]
    put_in, came_out = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    for step in range(4):
        tensors = [gradient(shape, seed=10 * step + rank) for rank in range(3)]
        put_in += sum(t.double() for t in tensors)
        means = reduce_together([codec.reduce_rounds(t, s) for t, s in zip(tensors, states, strict=True)])
        assert all(torch.equal(mean, means[0]) for mean in means)
        came_out += 3 * means[0].double()
    kept = sum((s.elementwise["error"].double().view(shape) for s in states if s.elementwise), torch.zeros(shape))
    tolerance = {"fp16": 0.2, "bf16": 1.0}.get(codec.name, 1e-4)
    assert float((came_out + kept - put_in).abs().max()) < tolerance


def reduce_together(rounds: list[Rounds]) -> list[Tensor]:
    """Run the workers' rounds in one process: stack what they yield, send back the mean."""
    sent = [next(one) for one in rounds]
    results: list[Tensor] = []
    while not results:
        mean = torch.stack([s.double() for s in sent]).mean(dim=0)
        # In place, as a collective does it.
        means, sent = [s.copy_(mean) for s in sent], []
        for one, reduced in zip(rounds, means, strict=True):
            try:
                sent.append(one.send(reduced))
            except StopIteration as stop:
                results.append(stop.value)
    return results
