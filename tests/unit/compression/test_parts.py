"""The parts below the codecs: bits, indices, selection, prefix code, messages, dither."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from echelon.compression import bits, blocks, prefix_code
from echelon.compression.base import NonFiniteError, State, fuse_rounds
from echelon.compression.bits import index_bytes, pack_indices, unpack_indices
from echelon.compression.registry import build
from echelon.compression.selection import largest
from echelon.compression.wire import pack, packed_bytes, unpack


@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 1000, 200_001])
def test_codes_of_any_width_come_back(n: int) -> None:
    generator = torch.Generator().manual_seed(n)
    for width in (1, 2, 3, 5, 8):
        codes = torch.randint(0, 1 << width, (n,), generator=generator, dtype=torch.uint8)
        packed = bits.pack_codes(codes, width)
        assert packed.numel() == (n if width == 8 else width * bits.packed_size(n))
        assert torch.equal(bits.unpack_codes(packed, width, n), codes)
        if width < 8:  # as on a GPU
            assert torch.equal(bits._pack_planes(codes, width), packed)
            assert torch.equal(bits._unpack_planes(packed, width, n, torch.uint8), codes)


@pytest.mark.parametrize(
    ("n", "k"), [(0, 0), (1, 1), (9, 0), (9, 9), (1000, 1), (1000, 10), (1000, 900), (10**6, 9999)]
)
def test_indices_come_back_in_few_bits(n: int, k: int) -> None:
    indices = torch.randperm(n, generator=torch.Generator().manual_seed(k))[:k].sort().values
    packed = pack_indices(indices, n)
    assert packed.numel() == index_bytes(n, k) <= bits.packed_size(n)
    assert torch.equal(unpack_indices(packed, n, k), indices)


def test_indices_are_near_their_entropy() -> None:
    assert 8 * index_bytes(10**6, 10_000) / 10_000 < 8.7  # log2(binomial) / k is 8.08


def test_damaged_indices_are_refused() -> None:
    packed = pack_indices(torch.tensor([3, 500, 999]), 1000)
    for damaged in (packed[:-1], torch.zeros_like(packed), torch.full_like(packed, 255)):
        with pytest.raises(ValueError, match="indices"):
            unpack_indices(damaged, 1000, 3)


@pytest.mark.parametrize("n", [1, 100, 20_000, 300_000])
@pytest.mark.parametrize("share", [0.0001, 0.01, 0.3, 1.0])
def test_largest_is_exact_without_a_sort(n: int, share: float) -> None:
    x = torch.randn(n, generator=torch.Generator().manual_seed(n))
    k = max(1, int(share * n))
    assert torch.equal(largest(x, k, State("w")), torch.topk(x.abs(), k).indices.sort().values)


@pytest.mark.parametrize("kind", ["zeros", "one large", "equal", "large at sampled places"])
def test_largest_survives_a_sample_that_misleads(kind: str) -> None:
    x = torch.zeros(600_000)
    if kind == "one large":
        x[123_457] = 5
    elif kind == "equal":
        x += 1
    elif kind == "large at sampled places":
        x[::3] = torch.rand(200_000, generator=torch.Generator().manual_seed(0)) + 1
    chosen = largest(x, 1000, State("w"))
    assert chosen.unique().numel() == 1000
    assert torch.equal(x[chosen].sort().values, torch.topk(x, 1000).values.sort().values)


@pytest.mark.parametrize("n", [0, 1, 127, 129, 5000, 300_001])
def test_prefix_code_comes_back(n: int) -> None:
    rng = np.random.default_rng(n)
    for symbols in (
        rng.geometric(0.4, n).clip(0, 255).astype(np.uint8),
        np.full(n, 7, np.uint8),
        rng.integers(0, 256, n).astype(np.uint8),
        (2.0 ** rng.uniform(0, 8, n)).astype(np.uint8),
    ):
        counts = np.bincount(symbols, minlength=256)
        lengths = prefix_code.code_lengths(counts)
        assert lengths.max(initial=0) <= prefix_code.MAX_BITS
        coded = prefix_code.encode(symbols, lengths)
        assert coded.size == prefix_code.coded_size(counts, lengths)
        assert np.array_equal(prefix_code.decode(coded, n), symbols)


def test_very_skewed_counts_keep_codes_short() -> None:
    counts = np.zeros(256, np.int64)
    counts[:40] = 2 ** np.arange(40)
    lengths = prefix_code.code_lengths(counts)
    assert lengths[:40].min() >= 1 and lengths.max() <= prefix_code.MAX_BITS
    assert (2.0 ** -lengths[:40].astype(float)).sum() <= 1


def test_prefix_code_is_near_the_entropy() -> None:
    symbols = np.random.default_rng(0).geometric(0.4, 200_000).clip(0, 255).astype(np.uint8)
    counts = np.bincount(symbols, minlength=256)
    share = counts[counts > 0] / counts.sum()
    entropy = -(share * np.log2(share)).sum()
    coded = prefix_code.encode(symbols, prefix_code.code_lengths(counts))
    assert 8 * coded.size / symbols.size < 1.05 * entropy


def test_damaged_coded_streams_are_refused_or_decode_to_something() -> None:
    """Any bytes either raise ValueError or give n symbols: never a crash or a read beyond the stream."""
    rng = np.random.default_rng(0)
    symbols = rng.geometric(0.4, 3000).clip(0, 255).astype(np.uint8)
    coded = prefix_code.encode(symbols, prefix_code.code_lengths(np.bincount(symbols, minlength=256)))
    refused = 0
    for _ in range(100):
        damaged = coded.copy()
        damaged[rng.integers(0, coded.size, 5)] ^= rng.integers(1, 256, 5).astype(np.uint8)
        try:
            assert prefix_code.decode(damaged, 3000).size == 3000
        except ValueError:
            refused += 1
    assert refused > 50


def test_huffman_is_skipped_where_it_does_not_pay() -> None:
    codec = build("sign+huffman")
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    state = codec.init_state("w", x)
    codec.compress(x, state)
    assert state.numbers["planes_coded"] == 0 and state.numbers["planes_plain"] == 2
    paying = build("qsgd+huffman")
    state = paying.init_state("w", x)
    paying.compress(x, state)
    assert state.numbers["planes_coded"] >= 1
    assert state.numbers["sent_bytes"] < 0.95 * state.numbers["plain_bytes"]


@pytest.mark.parametrize(("seconds", "pays"), [(10.0, True), (1e-6, False)], ids=["slow link", "fast link"])
def test_huffman_counts_its_own_seconds(seconds: float, pays: bool) -> None:
    codec = build("qsgd+huffman")
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    state = codec.init_state("w", x)
    first = codec.compress(x, state)  # nothing is known yet
    codec.extract(first)
    codec.relay().transferred(first.n_bytes, seconds)  # what the way back measures counts for both
    later = codec.compress(x, state)
    assert (later.n_bytes < 1.05 * first.n_bytes) == pays
    assert (state.numbers["planes_slow"] == 0) == pays
    assert state.numbers["coding_s"] > 0
    assert state.numbers["bytes_per_s"] == pytest.approx(first.n_bytes / seconds)


def test_huffman_is_measured_again_now_and_then() -> None:
    codec = build("qsgd+huffman")
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    state = codec.init_state("w", x)
    codec.compress(x, state)
    codec.transferred(100_000, 1e-6)
    coded = []
    for _ in range(128):
        before = state.numbers["planes_coded"]
        codec.compress(x, state)
        coded.append(state.numbers["planes_coded"] > before)
    assert sum(coded) == 2


def test_messages_keep_alignment_and_order() -> None:
    tensors = [torch.arange(3, dtype=torch.uint8), torch.arange(5.0), torch.empty(0, dtype=torch.int64)]
    layout = tuple((t.dtype, t.numel()) for t in tensors)
    buffer = pack(tensors, with_lengths=False)
    assert buffer.numel() == packed_bytes(layout) == 8 + 24
    shifted = torch.cat([torch.zeros(3, dtype=torch.uint8), buffer])[3:]
    for found, tensor in zip(unpack(shifted, layout), tensors, strict=True):
        assert torch.equal(found, tensor)
    with pytest.raises(ValueError, match="message"):
        unpack(pack(tensors, with_lengths=True), ((torch.uint8, None), (torch.float32, 4), (torch.int64, None)))


def test_dither_is_uniform_and_windows_match_the_gathered_form() -> None:
    table = blocks.dither_table(torch.device("cpu"))
    assert torch.equal(
        table[: blocks.DITHER_PERIOD].sort().values * blocks.DITHER_PERIOD, torch.arange(blocks.DITHER_PERIOD) + 0.5
    )
    starts = blocks.dither_offsets(99, 3)
    whole = blocks.gathered_dither(99, 150_000, 65_000, torch.device("cpu"))
    for i, start in enumerate(starts):
        size = min(65_000, 150_000 - 65_000 * i)
        assert torch.equal(whole[65_000 * i :][:size], table[start : start + size])


def test_senders_and_steps_have_dithers_of_their_own() -> None:
    keys = {State("w", seed=s, stream=r, numbers={"step": t}).own_key() for s in (0, 1) for r in (0, 1) for t in (0, 1)}
    assert len(keys) == 8
    assert State("w", stream=0).shared_key() == State("w", stream=1).shared_key() != State("v").shared_key()


def test_a_vote_takes_the_majority() -> None:
    codec = build("sign(vote=true, magnitude=0.5)")
    workers = torch.tensor([[1.0, 1, -1, -3], [2.0, -1, -1, 9], [3.0, 1, 1, -2]])
    tally = torch.zeros(4)
    for rank, gradient in enumerate(workers):
        codec.add_to(tally, codec.compress(gradient, codec.init_state("w", gradient, stream=rank)))
    back = codec.relay()
    assert codec.direction
    result = back.extract(back.compress(tally, back.init_state("w", tally)))
    assert result.tolist() == [0.5, 0.5, -0.5, -0.5]


def test_ties_of_a_vote_take_turns() -> None:
    back = build("sign(vote=true)").relay()
    state = back.init_state("w", torch.zeros(6))
    first, second = (back.extract(back.compress(torch.zeros(6), state)) for _ in range(2))
    assert torch.equal(first, -second) and float(first.sum()) == 0


def test_fused_rounds_give_what_single_rounds_give() -> None:
    codec = build("powersgd(rank=2)")
    tensors = [torch.randn(s, generator=torch.Generator().manual_seed(1)) for s in [(30, 20), (7,), (8, 3, 5, 5)]]
    singles = []
    for i, tensor in enumerate(tensors):
        rounds = codec.reduce_rounds(tensor, codec.init_state(f"w{i}", tensor))
        try:
            mean = next(rounds)
            while True:
                mean = rounds.send(mean)
        except StopIteration as stop:
            singles.append(stop.value)
    fused = fuse_rounds([codec.reduce_rounds(t, codec.init_state(f"w{i}", t)) for i, t in enumerate(tensors)])
    count, piece = 1, next(fused)
    try:
        while True:
            piece = fused.send(piece)
            count += 1
    except StopIteration as stop:
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(stop.value, singles, strict=True))
    assert count == 2


def test_warm_start_finds_a_low_rank_matrix() -> None:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(60, 2, generator=generator) @ torch.randn(2, 50, generator=generator)
    codec = build("powersgd(rank=2)")
    inner_state = codec.init_state("w", matrix)
    for _ in range(3):
        inner_state.elementwise["error"].zero_()
        decoded = codec.extract(codec.compress(matrix, inner_state))
    assert float((decoded - matrix).norm() / matrix.norm()) < 1e-4


def test_adaptive_threshold_follows_drifting_gradients() -> None:
    """Gradients shrink 30-fold and change their tails over 200 steps: density within 20% of its target from step 50."""
    codec = build("threshold(density=0.01)")
    state = codec.init_state("w", torch.empty(100_000))
    for step in range(200):
        generator = torch.Generator().manual_seed(step)
        normal = torch.randn(100_000, generator=generator)
        gradient = normal * normal.abs() ** (0.5 * step / 200) * 30 ** (-step / 200) * (1 + 0.3 * (step % 7 == 0))
        codec.compress(gradient, state)
        if step >= 50:
            assert 0.008 < state.numbers["sent"] < 0.012, step


@pytest.mark.parametrize(
    ("shape", "density"),
    [((1024, 1024), 0.01), ((4096, 1024), 0.001), ((524_288,), 0.005), ((1500,), 0.02), ((50, 100), 0.01)],
)
def test_adaptive_threshold_holds_on_columns_of_different_size_and_on_small_tensors(
    shape: tuple[int, ...], density: float
) -> None:
    codec = build(f"threshold(density={density})")
    state = codec.init_state("w", torch.empty(shape))
    columns = torch.randn(1024, generator=torch.Generator().manual_seed(5)).exp()
    for step in range(60):
        gradient = torch.randn(shape, generator=torch.Generator().manual_seed(step))
        if gradient.numel() % 1024 == 0:
            gradient = (gradient.view(-1, 1024) * columns).view(shape)
        codec.compress(gradient, state)
        if step >= 50:
            assert state.numbers["sent"] == pytest.approx(density, rel=0.2), step


@pytest.mark.parametrize("values", [[-3, -2, -1, 0, 1, 2, 3], [0] * 9 + [1]], ids=["few", "counts"])
@pytest.mark.parametrize("numel", [30_000, 400_000])
def test_a_threshold_keeps_its_density_where_many_elements_are_equal(values: list[int], numel: int) -> None:
    codec = build("threshold(density=0.01)")
    state = codec.init_state("w", torch.empty(numel))
    generator = torch.Generator().manual_seed(0)
    for _ in range(12):
        gradient = torch.tensor(values)[torch.randint(len(values), (numel,), generator=generator)].float()
        codec.compress(gradient, state)
        assert 0.008 <= state.numbers["sent"] <= 0.012


def test_equal_elements_are_sent_in_turn() -> None:
    codec = build("threshold(density=0.25)")
    state = codec.init_state("w", torch.empty(8))
    total = sum(codec.extract(codec.compress(torch.ones(8), state)) for _ in range(40))
    assert float(total.min()) > 30, "nothing waits for ever"
    codec.compress(torch.zeros(8), codec.init_state("v", torch.empty(8)))


@pytest.mark.parametrize("grid", [blocks.Grid(127, 1024), blocks.Grid(7, 100), blocks.Grid(1, 512, 2.5)])
@pytest.mark.parametrize("sizes", [(1,), (5000, 4999, 5001), (300_000, 300_000), (131_072, 1, 262_145)])
def test_several_tensors_are_rounded_in_one_go_as_each_alone(grid: blocks.Grid, sizes: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(size, generator=generator) * 3 for size in sizes]
    states = [State(f"w{j}", 3, j) for j in range(len(sizes))]
    alone = [blocks.quantise(part, grid, state) for part, state in zip(parts, states)]
    made = blocks.quantise_parts(parts, grid, states)
    for (steps, codes), (wanted_steps, wanted_codes) in zip(made, alone):
        if grid.clip:  # a mean of squares is rounded otherwise
            torch.testing.assert_close(steps, wanted_steps, rtol=1e-5, atol=0)
            assert (codes != wanted_codes).float().mean() < 1e-3 or len(codes) == 1
        else:
            assert torch.equal(steps, wanted_steps) and torch.equal(codes, wanted_codes)
    values = blocks.dequantise_parts(made, grid)
    for (steps, codes), value in zip(made, values):
        whole = torch.empty(len(codes))
        for _ in blocks.dequantise(steps, codes, grid, whole):
            pass
        assert torch.equal(value, whole)


def test_not_finite_in_one_of_several_is_refused() -> None:
    parts = [torch.ones(10), torch.tensor([1.0, torch.nan])]
    with pytest.raises(NonFiniteError):
        blocks.quantise_parts(parts, blocks.Grid(127, 1024), [State("a"), State("b")])
