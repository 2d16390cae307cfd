"""What begins and ends a run with a biased codec: messages that are nearly whole, and stages of topk's density."""

import pytest
import torch

from echelon.compression import read

BIASED = ["sign", "threshold(density=0.01)", "powersgd(2)", "randomk(0.1)"]


@pytest.mark.parametrize("spec", BIASED)
def test_first_and_last_messages_lose_next_to_nothing(spec: str) -> None:
    codec = read(spec).for_run(200).build()
    whole = [step for step in range(200) if codec.at(step).inner.name in ("int8", "bf16")]  # type: ignore[attr-defined]
    assert whole == [*range(10), *range(196, 200)]


@pytest.mark.parametrize("spec", ["topk(0.01, warmup_steps=0, finish_steps=0)", "sign(warmup_steps=0, finish_steps=0)"])
def test_they_can_be_switched_off(spec: str) -> None:
    codec = read(spec).for_run(200).build()
    assert all(codec.at(step) is codec for step in range(200))
    assert not read(spec).for_run(1000).length_notes()


@pytest.mark.parametrize("spec", ["int8", "none", "qsgd", "sign(vote=true)"])
def test_codecs_without_error_feedback_are_the_same_throughout(spec: str) -> None:
    codec = read(spec).for_run(200).build()
    assert all(codec.at(step) is codec for step in (0, 100, 199))


def test_nothing_is_eased_where_the_length_is_not_known() -> None:
    codec = read("sign").for_run(0).build()
    assert codec.at(0) is codec and codec.at(10**6) is codec


def test_topk_sends_less_in_each_stage_and_every_size_is_known() -> None:
    codec = read("topk(0.01)").for_run(100).build()
    sizes = [codec.at(step).n_bytes(10_000) for step in range(98)]
    assert None not in sizes
    assert sizes == sorted(sizes, reverse=True)  # type: ignore[type-var]
    assert len(set(sizes)) == 4 and sizes[19] != sizes[20] == sizes[97]


def test_momentum_is_zeroed_where_a_stage_of_the_warm_up_has_sent() -> None:
    compression, _ = read("topk(0.01)").with_momentum(0.9)
    codec = compression.for_run(100).build()
    gradient = torch.randn(4096)
    state = codec.init_state("w", gradient)
    for step in (0, 1):  # 31.6% are sent
        codec.at(step).compress(gradient, state)
        kept = state.elementwise["velocity"] != 0

        assert 0.6 < kept.float().mean() < 0.75


def test_what_waits_is_dropped_when_a_message_is_whole() -> None:
    codec = read("sign").for_run(20).build()
    gradient = torch.randn(4096)
    state = codec.init_state("w", gradient)
    for step in range(19):
        codec.at(step).compress(gradient, state)
    assert state.elementwise["error"].any() and state.step == 19
    last = codec.at(19)
    sent = last.extract(last.compress(gradient, state))
    assert not state.elementwise["error"].any()
    torch.testing.assert_close(sent, gradient, atol=float(gradient.abs().max()) / 100, rtol=0.0)


def test_a_run_that_is_too_short_is_told() -> None:
    assert any("may lose accuracy" in note for note in read("topk(0.01)").for_run(188).length_notes())
    assert not any("may lose accuracy" in note for note in read("topk(0.01)").for_run(500).length_notes())
