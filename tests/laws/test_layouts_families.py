"""Law 1 for model families: split in two ways at once, tensor parallelism one of them, they train as one process."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from echelon.config import build
from echelon.data.base import DataInfo
from echelon.observe.phases import HostClock
from echelon.run.resolve import resolve
from echelon.trainer.parts import build_parts
from echelon.trainer.state import seed_everything
from echelon.trainer.work import Work
from tests.laws.extras import NEEDS_TRANSFORMERS
from tests.laws.test_tensor_parallel import CASES, CLASSES, bert, example, gpt2
from tests.ranks.layouts import TASK, HeldTensor, assemble, held, make_world, train_on_one_batch
from tests.ranks.spawn import Rank, run_ranks

STEPS = 4
FAMILIES = ("timm_vit", "timm_convnext", "timm_resnet", "timm_resnet_bottleneck", "torchvision_resnet",
            "small_gpt_untied", "small_vit", "resnet20")  # fmt: skip
LAYOUTS = ("fsdp=2,tp=2", "pp=2,tp=2,microbatches=1", "dp=2,tp=2")


TRANSFORMERS: Mapping[str, Callable[[], nn.Module]] = {
    "transformers_bert": lambda: bert("BertForSequenceClassification"),
    "transformers_bert_masked_untied": lambda: bert("BertForMaskedLM", tie_word_embeddings=False),
    "transformers_gpt2_untied": lambda: gpt2(tie_word_embeddings=False),
}
ON_TWO = ("tp=2", "tp=2,sequence", "fsdp=2", "pp=2,microbatches=2")
ON_FOUR = ("fsdp=2,tp=2", "pp=2,tp=2,microbatches=2", "dp=2,pp=2,microbatches=2")
INFO = DataInfo("any", tuple("abcdefgh"), 1, 8, 64, 16, (8,) * CLASSES)
SETTINGS: Mapping[str, Any] = {"optimizer.name": "momentum", "optimizer.lr": 0.02, "data.batch_size": 4}

Found = tuple[list[float], dict[str, HeldTensor]]
Ranks = Sequence[Mapping[str, Found | str]]


def train(rank: Rank | None, name: str, layout: str, recompute: str = "none") -> Found:
    """Train a family in a layout; returns the losses of the global batches, and what this rank holds at the end."""
    described = {**SETTINGS, "strategy.parallel": layout, "model.sync_batchnorm": "resnet" in name}
    described["training.recompute"] = recompute
    config = build(None, described).config
    world = make_world(config, rank)
    seed_everything(1)
    model = {**CASES, **TRANSFORMERS}[name]().double()
    for parameter in model.parameters():  # no zero may hide a branch
        torch.nn.init.normal_(parameter.data, std=0.1) if not parameter.any() else None
    inputs, targets = example(name)
    clock = HostClock()
    parts = build_parts(resolve(config), Work(INFO, TASK, model, inputs[:2]), world, clock)
    losses = train_on_one_batch(parts, world, clock, (inputs, targets), STEPS)
    return losses, held(parts)


def attempt(rank: Rank, names: Sequence[str], layout: str, recompute: str = "none") -> dict[str, Found | str]:
    """Train all families; one that fails says so under its own name, and the others run on."""
    found: dict[str, Found | str] = {}
    for name in names:
        try:
            found[name] = train(rank, name, layout, recompute)
        except Exception:  # noqa: BLE001 - the test shows it
            found[name] = traceback.format_exc()
    return found


@pytest.fixture(scope="module")
def families(request: pytest.FixtureRequest) -> Ranks:
    return run_ranks(attempt, 4, FAMILIES, request.param, timeout_s=350)


@pytest.fixture(scope="module")
def on_two(request: pytest.FixtureRequest) -> Ranks:
    recompute = "blocks" if request.param == "fsdp=2" else "none"
    return run_ranks(attempt, 2, tuple(TRANSFORMERS), request.param, recompute, timeout_s=350)


@pytest.fixture(scope="module")
def on_four(request: pytest.FixtureRequest) -> Ranks:
    return run_ranks(attempt, 4, tuple(TRANSFORMERS), request.param, timeout_s=350)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("families", LAYOUTS, indirect=True)
@pytest.mark.parametrize("name", FAMILIES)
def test_families_in_two_ways_at_once_are_one_process(families: Ranks, name: str) -> None:
    check(families, name)


@NEEDS_TRANSFORMERS
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "on_two", [pytest.param(each, marks=[pytest.mark.slow] * ("pp" not in each)) for each in ON_TWO], indirect=True
)
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers_on_two_ranks_are_one_process(on_two: Ranks, name: str) -> None:
    check(on_two, name)


@NEEDS_TRANSFORMERS
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("on_four", ON_FOUR, indirect=True)
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers_in_two_ways_at_once_are_one_process(on_four: Ranks, name: str) -> None:
    check(on_four, name)


def check(ranks: Ranks, name: str) -> None:
    """Compare what the ranks found of a family with one process."""
    trained = [rank[name] for rank in ranks]
    for each in trained:
        assert not isinstance(each, str), each[-600:]
    pairs = [each for each in trained if not isinstance(each, str)]
    losses, parameters = train(None, name, "dp=1")
    whole, expected = assemble([pieces for _, pieces in pairs]), assemble([parameters])
    worst = max(np.abs(np.subtract(seen, losses)).max() for seen, _ in pairs)
    off = max(float(np.abs(whole[n] - expected[n]).max()) for n in expected if not n.endswith("_tracked"))
    assert worst <= 1e-9 and off <= 1e-9, f"losses differ by {worst}, state by {off}"
