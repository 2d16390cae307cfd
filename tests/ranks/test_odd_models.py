"""Modules that are unusual in one way train as one process does in any layout, or are refused in one line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

import echelon
from echelon.config import build
from echelon.core.errors import UserError
from echelon.data.base import DataInfo
from echelon.observe.phases import HostClock
from echelon.run.resolve import resolve
from echelon.sync.buffers import average_buffers, mean_of_replicas
from echelon.trainer.parts import build_parts
from echelon.trainer.state import seed_everything
from echelon.trainer.work import Work
from tests.ranks import odd_models
from tests.ranks.layouts import TASK, make_world, train_on_one_batch
from tests.ranks.spawn import Rank, run_ranks

STEPS = 3
INFO = DataInfo("any", tuple("abcd"), 1, 8, 64, 16, (8,) * odd_models.CLASSES)
SPLIT = {"strategy.parallel": "fsdp=2"}
RECOMPUTED = {**SPLIT, "training.recompute": "blocks"}


def train(rank: Rank | None, name: str, settings: Mapping[str, Any]) -> list[float] | str:
    """Train a module of `odd_models`; returns the losses of the global batches, or why it is refused."""
    described = {"optimizer.name": "momentum", "optimizer.lr": 0.02, "data.batch_size": 4, **settings}
    config = build(None, described).config
    world = make_world(config, rank)
    seed_everything(1)
    model = getattr(odd_models, name)().double()
    draw = torch.Generator().manual_seed(3)
    inputs = torch.randn(4, 1, 8, 8, generator=draw, dtype=torch.float64)
    targets = torch.randint(0, odd_models.CLASSES, (4,), generator=draw)
    clock = HostClock()
    try:
        parts = build_parts(resolve(config), Work(INFO, TASK, model, inputs[:2]), world, clock)
    except UserError as refusal:
        return str(refusal)
    losses = train_on_one_batch(parts, world, clock, (inputs, targets), STEPS)
    return losses


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("Nested", RECOMPUTED),
        ("Tied", SPLIT),
        ("Empty", SPLIT),
        ("GatedTokens", {"strategy.parallel": "tp=2"}),
        ("Normed", {"strategy.parallel": "tp=2"}),
        ("Branching", {"strategy.parallel": "pp=2,microbatches=2"}),
        ("Complex", {"strategy.parallel": "dp=2"}),
        ("Complex", {"strategy.parallel": "dp=2,zero1"}),
    ],
)
def test_unusual_modules_train_as_one_process(name: str, settings: Mapping[str, Any]) -> None:
    for losses in run_ranks(train, 2, name, settings, timeout_s=60):
        assert losses == pytest.approx(train(None, name, {}), abs=1e-9)


@pytest.mark.parametrize(
    "settings", [SPLIT, {"strategy.compression": "topk(0.5)"}, {"strategy.sync": "local(period=2)"}]
)
def test_complex_parameters_are_refused_where_only_real_numbers_travel(settings: Mapping[str, Any]) -> None:
    for refusal in run_ranks(train, 2, "Complex", settings, timeout_s=60):
        assert "filter is complex" in refusal, refusal


def test_a_chain_whose_steps_need_each_other_is_refused_on_all_ranks() -> None:
    for refusal in run_ranks(train, 2, "Uncut", {"strategy.parallel": "pp=2,microbatches=1"}, timeout_s=60):
        assert "cannot run by itself" in refusal, refusal


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ("up=column,down=row", "is not the same function (logits differ by "),
        ("up=column,down=replicate", "cannot compute one batch ("),
    ],
)
def test_a_tensor_plan_that_does_not_work_is_refused_by_the_module(plan: str, words: str) -> None:
    settings = {"strategy.parallel": "tp=2", "strategy.tensor_plan": plan}
    for refusal in run_ranks(train, 2, "Competing", settings, timeout_s=60):
        assert f"tp: the split model {words}" in refusal and "of down, a Linear" in refusal, refusal


def averaged(rank: Rank) -> list[complex]:
    """Average a complex buffer that differs by rank."""
    model = odd_models.Complex()
    model.get_buffer("seen").fill_(complex(rank.index, 2 * rank.index))
    average_buffers(model, torch.distributed.group.WORLD)
    return model.get_buffer("seen").tolist()  # type: ignore[no-any-return]


def test_complex_buffers_are_averaged_whole() -> None:
    mean = run_ranks(averaged, 2, timeout_s=60)[0]
    assert mean == [0.5 + 1j] * len(mean)
    copies = [{"seen": torch.tensor([complex(r, 2 * r)])} for r in range(2)]
    assert mean_of_replicas(copies)["seen"].tolist() == [0.5 + 1j]


@pytest.mark.long
def test_complex_tensors_go_through_evaluation_and_resume(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    data = TensorDataset(torch.randn(48, 8, generator=draw), torch.arange(48) % odd_models.CLASSES)
    common: dict[str, Any] = {"batch_size": 8, "device": "cpu", "threads": 1, "workers": 2, "schedule": "constant"}

    def model() -> odd_models.Complex:
        torch.manual_seed(0)
        return odd_models.Complex().double()

    whole = echelon.train(model(), (data, data), run=tmp_path / "whole", epochs=2, **common)
    echelon.train(model(), (data, data), run=tmp_path / "resumed", epochs=1, **common)
    resumed = echelon.resume(tmp_path / "resumed", model=model(), data=(data, data), epochs=2)
    values = resumed.model().state_dict()
    for name, value in whole.model().state_dict().items():
        assert torch.equal(values[name], value), name
        assert not torch.equal(value, model().state_dict()[name]), name
    assert values["filter"].is_complex() and values["seen"].is_complex()
    network = resumed.model().eval()
    right = sum(int(network(x[None]).argmax()) == y for x, y in data) / len(data)
    assert resumed.metrics["top1"] == pytest.approx(right)
