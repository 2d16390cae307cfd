"""Precisions over ranks: an overflow anywhere skips the step everywhere, narrow types through a pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import echelon
from echelon.data.base import Batch
from echelon.models import hints_for
from echelon.models.base import ModelInput
from echelon.models.builtin.small_vit import Size, SmallViT
from echelon.parallel.pipeline import Judge, Pipeline, PipelineSettings
from echelon.trainer.precision import build_scaler
from tests.laws.test_layouts import check_same_function, train
from tests.ranks.layouts import Trial, make_trainer
from tests.ranks.spawn import Rank, run_ranks

IMAGES = ModelInput(10, 1, 8)
STEPS = 6
TYPES: dict[str, tuple[torch.dtype | None, torch.dtype | None]] = {
    "bf16": (torch.bfloat16, None),
    "bf16-params": (None, torch.bfloat16),
    "fp16": (torch.float16, None),
}


def vit() -> nn.Module:
    """Build the same small model on every rank."""
    torch.manual_seed(0)
    return SmallViT(IMAGES, Size(depth=2, width=16, heads=2, hidden=16))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum over samples; the type says whether losses are wide."""
    assert logits.dtype == torch.float32
    return F.cross_entropy(logits, targets, reduction="sum")


def batch() -> tuple[Tensor, Tensor]:
    """Return inputs and targets."""
    random = torch.Generator().manual_seed(1)
    return torch.randn(8, 1, 8, 8, generator=random), torch.arange(8)


def overflow(rank: Rank) -> tuple[float, float, list[float]]:
    """Overflow on rank 1 alone, in a model of which each rank has its own piece; returns weights and scales."""
    piece = nn.Parameter(torch.ones(()))
    optimizer = torch.optim.SGD([piece], lr=0.5)
    scaler = build_scaler("fp16", torch.device("cpu"), dist.group.WORLD)
    seen = []
    for step in range(2):
        factor = float("inf") if step == 0 and rank.index == 1 else 1.0
        scaler.scale(piece * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen.append(float(piece.detach()))
    return seen[0], seen[1], [scaler.get_scale()]


def test_an_overflow_in_one_piece_skips_the_step_in_all() -> None:
    """Both ranks skip the first step, halve their scale, and take the second."""
    assert run_ranks(overflow, 2) == [(1.0, 0.5, [2.0**15])] * 2


def overflow_in_a_share(rank: Rank) -> tuple[list[bool], float]:
    """Overflow in a parameter that one rank's part of the optimizer has; returns what moved in each of two steps."""
    trial = Trial("vit", "dp=2,zero1", {"training.precision": "fp16"})
    trainer = make_trainer(trial, rank)
    parameters = list(trainer.parts.model.parameters())
    inputs, targets = trial.global_batch(0)
    mine = slice(rank.index * 4, rank.index * 4 + 4)
    moved = []
    for step in range(2):
        before = [p.detach().clone() for p in parameters]
        trainer.step.forward_backward(Batch(inputs[mine], targets[mine], 8, step), trainer.parts.sync)
        if step == 0:
            assert parameters[0].grad is not None
            parameters[0].grad.fill_(float("inf"))
        trainer.parts.sync.step()
        moved.append(any(not torch.equal(p, b) for p, b in zip(parameters, before, strict=True)))
    return moved, trainer.parts.scaler.get_scale()


def test_an_overflow_in_one_share_of_a_divided_optimizer_skips_the_step_in_all() -> None:
    assert run_ranks(overflow_in_a_share, 2) == [([False, True], 2.0**15)] * 2


def piped(rank: Rank) -> dict[str, tuple[list[float], Any]]:
    """Train through a pipeline in each precision; returns losses, and the types between and of the stages."""
    mesh = init_device_mesh("cpu", (rank.world_size,), mesh_dim_names=("pp",))
    found = {}
    for name, (autocast, parameters) in TYPES.items():
        model = vit()
        settings = PipelineSettings("zero_bubble", 4, autocast=autocast, parameters=parameters, recorded=0)
        pipeline = Pipeline(model, hints_for(model), mesh, settings, Judge(loss_of), batch()[0][:2])
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
        scaler = build_scaler(name, torch.device("cpu"), mesh.get_group())
        losses = []
        for _ in range(STEPS):
            losses.append(float(pipeline.forward_backward(*batch(), 8, scaler.scale).loss))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        found[name] = losses, {p.dtype for p in pipeline.parameters()}
    return found


def in_float32() -> list[float]:
    """Return the losses of one process."""
    model, losses = vit(), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(STEPS):
        inputs, targets = batch()
        loss = loss_of(model(inputs), targets) / 8
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def test_a_pipeline_computes_in_narrow_types() -> None:
    """Losses are float32 and near one process's: bfloat16 has 8 bits, so 2% after a few steps; parameters stay wide."""
    exact = torch.tensor(in_float32())
    for rank in run_ranks(piped, 2):
        for name, (losses, types) in rank.items():
            assert types == {torch.float32}
            assert torch.allclose(torch.tensor(losses), exact, rtol=0.02), (name, losses, exact)


LAYOUTS = ("dp=2", "fsdp=2", "tp=2", "pp=2,microbatches=2")


def test_scaled_losses_change_nothing_in_any_layout() -> None:
    """The scale is a power of two: with a float64 model, which autocast leaves alone, nothing may differ."""
    settings = {"training.precision": "fp16", "optimizer.clip_norm": 0.5, "training.accumulate": 2}
    trials = [Trial("vit", layout, settings) for layout in (*LAYOUTS, "dp=2,zero1")]
    trials.append(Trial("vit", LAYOUTS[-1], {**settings, "model.tune": "head"}))  # a stage has no gradient to check
    check_same_function(trials, 2, steps=6)


def test_narrow_parameters_in_any_layout() -> None:
    """Losses near those of wide ones, and masters that are what they were; blocks computed again too."""
    narrow = {"training.precision": "bf16-params"}
    trials = [Trial("vit", layout, narrow) for layout in LAYOUTS]
    trials += [Trial("vit", layout, {**narrow, "training.recompute": "blocks"}) for layout in LAYOUTS[:2]]
    wide = make_trainer(Trial("vit", "dp=1"), None)
    wide.run(0, STEPS)
    for rank in run_ranks(train, 2, trials, STEPS):
        for trial, (losses, held) in zip(trials, rank, strict=True):
            assert all(piece.values.dtype == np.float64 for piece in held.values())
            assert losses != wide.losses and np.allclose(losses, wide.losses, rtol=0.03), trial


class Watched(nn.Module):
    """A layer that notes in which type it computed, by whether it was in training mode."""

    seen: ClassVar[set[tuple[bool, torch.dtype]]] = set()

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layer(x.flatten(1))
        Watched.seen.add((self.training, logits.dtype))
        return logits


@pytest.mark.long
def test_a_run_evaluates_in_the_type_that_it_trains_in(tmp_path: Path) -> None:
    Watched.seen.clear()
    described: dict[str, Any] = {"workers": 1, "device": "cpu", "precision": "bf16", "max_steps": 2}
    echelon.train(Watched(), "digits", tmp_path / "run", **described)
    assert {(True, torch.bfloat16), (False, torch.bfloat16)} <= Watched.seen
