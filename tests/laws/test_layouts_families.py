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
from echelon.data.base import Batch, DataInfo, Shard
from echelon.data.order import local_part
from echelon.observe.phases import HostClock
from echelon.run.resolve import resolve
from echelon.trainer.parts import Work, build_parts
from echelon.trainer.state import seed_everything
from echelon.trainer.step import Step, StepSettings
from tests.laws.test_tensor_parallel import CASES, CLASSES, bert, example, gpt2
from tests.ranks.layouts import TASK, HeldTensor, assemble, held, make_world
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
    step = Step(TASK, StepSettings(world.device, None, 1, 0.0, False), clock, parts.scaler, parts.split)
    own = torch.from_numpy(local_part(np.arange(len(inputs)), Shard(world.data_rank, world.data_size)))
    losses = []
    for number in range(STEPS):
        result = step.forward_backward(Batch(inputs[own], targets[own], len(inputs), number), parts.sync)
        loss = result.loss.double() * world.counts
        if world.group is not None:
            torch.distributed.all_reduce(loss)
        losses.append(float(loss))
        parts.sync.step()
    parts.sync.close()
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


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_families_in_two_ways_at_once_are_one_process(layout: str) -> None:
    check(run_ranks(attempt, 4, FAMILIES, layout, timeout_s=350))


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "layout", [pytest.param(each, marks=[pytest.mark.slow] * ("pp" not in each)) for each in ON_TWO]
)
def test_transformers_on_two_ranks_are_one_process(layout: str) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: it is the extra `transformers`")
    recompute = "blocks" if layout == "fsdp=2" else "none"
    check(run_ranks(attempt, 2, tuple(TRANSFORMERS), layout, recompute, timeout_s=350))


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("layout", ON_FOUR)
def test_transformers_in_two_ways_at_once_are_one_process(layout: str) -> None:
    pytest.importorskip("transformers", reason="transformers is not installed: it is the extra `transformers`")
    check(run_ranks(attempt, 4, tuple(TRANSFORMERS), layout, timeout_s=350))


def check(ranks: Sequence[Mapping[str, Found | str]]) -> None:
    """Compare what the ranks found with one process, family by family."""
    failed = {}
    for name in ranks[0]:
        found = [rank[name] for rank in ranks]
        texts = [each for each in found if isinstance(each, str)]
        if texts:
            failed[name] = texts[0][-600:]
            continue
        trained = [each for each in found if not isinstance(each, str)]
        losses, parameters = train(None, name, "dp=1")
        whole, expected = assemble([each[1] for each in trained]), assemble([parameters])
        worst = max(np.abs(np.subtract(each[0], losses)).max() for each in trained)
        off = max(float(np.abs(whole[n] - expected[n]).max()) for n in expected if not n.endswith("_tracked"))
        if worst > 1e-9 or off > 1e-9:
            failed[name] = f"losses differ by {worst}, state by {off}"
    assert not failed, "\n\n".join(f"{name}: {text}" for name, text in failed.items())
