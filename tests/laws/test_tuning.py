"""Laws 1 and 10 of tuning: the same function in every layout, and what is frozen is not paid for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tests.laws.extras import NEEDS_PEFT
from tests.laws.test_layouts import BATCHNORM, STEPS, Trained, _compare, train
from tests.ranks.layouts import Trial, make_trainer
from tests.ranks.spawn import Rank, run_ranks

HEADERS = 2 * 1024  # bytes that gloo sends beside the values of two steps
ADAM = {"optimizer.name": "adamw", "optimizer.lr": 0.003}
EVERYWHERE = 'lora(r=2, targets="qkv+proj+fc1+fc2")'
QUICK = (
    Trial("vit", "dp=2", {"model.tune": "head", **ADAM}),
    Trial("vit", "fsdp=2", {"model.tune": "last(1)+layer_decay(0.5)", "optimizer.clip_norm": 0.5, **ADAM}),
    Trial("gpt", "tp=2", {"model.tune": "bias"}),
    Trial("vit", "pp=2,microbatches=2", {"model.tune": "head", "optimizer.clip_norm": 0.5, **ADAM}),
)
RING = {"strategy.compression": "none", "strategy.collective": "ring"}
LORA = (
    Trial("vit", "dp=2", {"model.tune": "lora(r=2)+layer_decay(0.5)", **ADAM}),
    Trial("vit", "dp=2,zero1", {"model.tune": "lora(r=2)", **RING}),
    Trial("vit", "fsdp=2", {"model.tune": "lora(r=2)+norm", "optimizer.clip_norm": 0.5, **ADAM}),
    Trial("vit", "tp=2", {"model.tune": EVERYWHERE, "optimizer.clip_norm": 0.5, **ADAM}),
    Trial("gpt", "tp=2,sequence", {"model.tune": EVERYWHERE, **ADAM}),
    Trial("resnet", "tp=2", {"model.tune": "lora(r=2)", **BATCHNORM}),
    Trial("vit", "pp=2,microbatches=2", {"model.tune": "lora(r=2)+bias", **ADAM}),
    Trial("resnet", "fsdp=2", {"model.tune": "lora(r=2)", **BATCHNORM}),
)
LORA_BOTH = (
    Trial("gpt", "fsdp=2,tp=2", {"model.tune": EVERYWHERE, "optimizer.clip_norm": 0.5, **ADAM}),
    Trial("vit", "tp=2,pp=2", {"model.tune": EVERYWHERE, **ADAM}),
)
MORE = (
    Trial("vit", "pp=2,microbatches=2", {"model.tune": "bias+layer_decay(0.5)", **ADAM}),
    Trial("vit", "pp=2,schedule=interleaved,microbatches=2", {"model.tune": "head", **ADAM}),
    Trial("vit", "pp=2,schedule=zero_bubble,microbatches=2", {"model.tune": "head", **ADAM}),
    Trial("vit", "dp=2,zero1", {"model.tune": "norm+layer_decay(0.5)", **ADAM}),
    Trial("vit", "tp=2", {"model.tune": "last(1)+layer_decay(0.5)", "optimizer.clip_norm": 0.5, **ADAM}),
    Trial("gpt", "fsdp=2", {"model.tune": 'freeze("blocks.0")', **ADAM}),
    Trial("resnet", "dp=2", {"model.tune": "head", **BATCHNORM}),
    Trial("resnet", "fsdp=2", {"model.tune": "last(2)", **BATCHNORM}),
    Trial("vit", "dp=2", {"model.tune": "last(1)", "strategy.compression": "none", "strategy.collective": "ring"}),
)


def paid_for(rank: Rank, trials: Sequence[Trial]) -> list[tuple[Trained, list[str], int, int]]:
    """Train each trial; returns what became of it, frozen tensors that were paid for, bytes sent, and trained bytes."""
    found = []
    for trial in trials:
        (trained,) = train(rank, [trial], STEPS)
        trainer = make_trainer(trial, rank)
        trainer.run(0, 2)
        parts = trainer.parts
        named = dict(parts.local_model.named_parameters())
        frozen = {name: p for name, p in named.items() if not p.requires_grad}
        paid = [name for name, p in frozen.items() if p.grad is not None or p in parts.optimizer.state]
        paid += [key for key in parts.sync.state_dict() for name in frozen if f"/{name}/" in key]
        sent = sum(parts.sync.bytes_sent().values())
        parts.sync.close()
        found.append((trained, paid, sent, 2 * sum(p.nbytes for p in named.values() if p.requires_grad)))
    return found


def check(trials: Sequence[Trial], world_size: int = 2) -> None:
    ranks = run_ranks(paid_for, world_size, trials, timeout_s=300)
    for i, trial in enumerate(trials):
        _compare(trial, [rank[i][0] for rank in ranks])
        for _, paid, sent, most in (rank[i] for rank in ranks):
            assert not paid, f"{trial}: {paid}"
            assert sent <= most + HEADERS, f"{trial}: {sent} bytes for {most} of gradients"


def test_tuning_is_the_same_function_in_every_layout_and_frozen_parts_are_not_paid_for() -> None:
    check(QUICK)


@pytest.mark.long
def test_more_tuning_is_the_same_function_in_every_layout() -> None:
    check(MORE)


@NEEDS_PEFT
@pytest.mark.parametrize(
    ("trials", "ranks"),
    [pytest.param(LORA, 2, marks=pytest.mark.slow), pytest.param(LORA_BOTH, 4, marks=pytest.mark.long)],
)
def test_adapters_are_the_same_function_in_every_layout(trials: Sequence[Trial], ranks: int) -> None:
    check(trials, ranks)


@pytest.mark.long
def test_codecs_have_no_memory_of_what_is_frozen() -> None:
    codecs = ("int8", "topk(0.1)", "sign", "powersgd(rank=1)")
    trials = [Trial("vit", "dp=2", {"model.tune": "last(1)", "strategy.compression": codec}) for codec in codecs]
    for rank in run_ranks(paid_for, 2, trials, timeout_s=300):
        for trial, (_, paid, sent, most) in zip(trials, rank, strict=True):
            assert not paid and sent <= most + HEADERS, f"{trial}: {paid}, {sent} bytes for {most} of gradients"


@pytest.mark.parametrize(
    ("tune", "trained"),
    [
        ("head", r"head\."),
        ("last(1)", r"blocks\.1\.|norm\.|head\."),
        ("bias", r".*bias$|head\."),
        ("norm", r".*norm|head\."),
        ('freeze("blocks.*+positions")', r"patches|norm|head\."),
    ],
)
def test_what_is_frozen_stays_and_all_else_moves(tune: str, trained: str) -> None:
    trainer = make_trainer(Trial("vit", settings={"model.tune": tune}), None)
    before = {name: p.detach().clone() for name, p in trainer.parts.model.named_parameters()}
    trainer.run(0, 3)
    for name, parameter in trainer.parts.model.named_parameters():
        expected = re.match(trained, name) is not None
        assert parameter.requires_grad == expected, name
        assert torch.equal(parameter, before[name]) != expected, name


def test_statistics_of_frozen_batchnorm_stay_unless_asked_for() -> None:
    def statistics(**settings: Any) -> tuple[np.ndarray, np.ndarray]:
        trainer = make_trainer(Trial("resnet", settings={"model.tune": "head", **settings}), None)
        module = next(m for m in trainer.parts.model.modules() if hasattr(m, "running_mean"))
        before = module.running_mean.numpy().copy()
        trainer.run(0, 3)
        return before, module.running_mean.numpy()

    assert np.array_equal(*statistics())
    assert not np.array_equal(*statistics(**{"model.frozen_norm": "train"}))


def test_layers_further_from_the_head_have_lower_rates() -> None:
    trainer = make_trainer(Trial("vit", settings={"model.tune": "layer_decay(0.5)"}), None)
    rates = {id(p): g["lr_scale"] for g in trainer.parts.optimizer.param_groups for p in g["params"]}
    named = {name: rates[id(p)] for name, p in trainer.parts.model.named_parameters()}
    assert named["head.weight"] == 1.0
    assert {n.split(".")[1]: rate for n, rate in named.items() if n.startswith("blocks")} == {"0": 0.25, "1": 0.5}
    assert named["positions"] == 0.125
