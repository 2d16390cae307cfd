"""Buckets depend on the model alone, and a merged state keeps the sum of memories."""

from __future__ import annotations

import pytest
import torch

from echelon.collectives import buckets, codec_state
from echelon.collectives.compressed_all_reduce import CodecShard
from echelon.compression.base import State


def test_small_parameters_share_a_cell_and_kinds_do_not_mix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buckets, "FIRST_BUCKET_NUMEL", 3000)
    monkeypatch.setattr(buckets, "BUCKET_NUMEL", 4000)
    named = [(f"w{i}", torch.zeros(50, 40)) for i in range(5)] + [(f"b{i}", torch.zeros(50)) for i in range(4)]
    named.append(("half", torch.zeros(50, 40, dtype=torch.bfloat16)))
    layout = buckets.lay_out(named)
    groups = [(c.group, [m.name for m in c.members]) for c in layout.buckets]
    assert groups == [
        ("weights", ["w0", "w1"]),
        ("weights", ["w2", "w3"]),
        ("weights", ["w4"]),
        ("small", ["b0", "b1", "b2", "b3"]),
        ("weights", ["half"]),
    ]
    assert layout.places["w3"].member.span == (2000, 4000)


def test_a_large_parameter_that_has_arrived_waits_for_no_later_one() -> None:
    layout = buckets.lay_out(
        [("head", torch.zeros(40, 40)), ("dense", torch.zeros(1500, 1000)), ("conv", torch.zeros(64, 288))]
    )
    assert [[m.name for m in c.members] for c in layout.buckets] == [["head", "dense"], ["conv"]]


def _bucket() -> buckets.Bucket:
    return buckets.lay_out([("a", torch.zeros(40, 30)), ("b", torch.zeros(40, 40))]).buckets[0]


def _held(ranks: int, rank: int, fill: float) -> list[CodecShard]:
    """States as a rank has them: one for each chunk it sends, one for the chunk it owns."""
    held = []
    spans = [(2800 * j // ranks, 2800 * (j + 1) // ranks) for j in range(ranks)]
    for j, span in enumerate(spans):
        state = State(f"cell0.{j}")
        state.elementwise["error"] = torch.full((span[1] - span[0],), fill)
        state.numbers["step"] = 7
        held.append(CodecShard(state, span, ranks))
    relay = State(f"cell0.{rank}.relay")
    relay.elementwise["error"] = torch.arange(*spans[rank], dtype=torch.float32)
    relay.factors["q"] = torch.full((3,), fill)
    return [*held, CodecShard(relay, spans[rank], 1, "relay")]


def test_a_state_comes_back() -> None:
    bucket, held, other = _bucket(), _held(2, 0, 3.0), _held(2, 0, 0.0)
    saved = {
        k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in codec_state.state_dict(bucket, held).items()
    }
    codec_state.load_state_dict(bucket, other, saved)
    for mine, theirs in zip(held, other, strict=True):
        assert torch.equal(mine.state.elementwise["error"], theirs.state.elementwise["error"])
        assert mine.state.numbers == theirs.state.numbers
    assert torch.equal(held[-1].state.factors["q"], other[-1].state.factors["q"])


def test_a_state_of_another_shape_is_refused_and_nothing_changes() -> None:
    bucket, held = _bucket(), _held(2, 0, 3.0)
    with pytest.raises(ValueError, match="another codec, model or number of ranks"):
        codec_state.load_state_dict(bucket, held, codec_state.state_dict(bucket, _held(3, 0, 1.0)))
    assert all(bool((h.state.elementwise["error"] == 3.0).all()) for h in held[:-1])


@pytest.mark.parametrize("ranks", [1, 2, 5])
def test_another_number_of_ranks_keeps_the_sums(ranks: int) -> None:
    bucket = _bucket()
    saved = [codec_state.state_dict(bucket, _held(3, rank, 1.0 + rank)) for rank in range(3)]
    merged = codec_state.merge(saved, {"a": 1200, "b": 1600})
    new = [_held(ranks, rank, 0.0) for rank in range(ranks)]
    for held in new:
        for h in held:
            h.state.factors.clear()
        codec_state.load_state_dict(bucket, held, merged)
    sent = sum(torch.cat([h.state.elementwise["error"] for h in held if h.role == "sent"]) for held in new)
    relay = torch.cat([held[-1].state.elementwise["error"] for held in new])
    assert torch.allclose(sent, torch.full((2800,), 6.0))
    assert torch.equal(relay, torch.arange(2800, dtype=torch.float32))
    assert new[-1][0].state.numbers["step"] == 7
