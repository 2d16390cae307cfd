"""Layers that single ranks leave out in a step, by their data or by chance: they are trained as in one process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from tests.ranks.replicas import Trial, make_parts
from tests.ranks.spawn import Rank, run_ranks

STEPS, BATCH, FEATURES = 40, 4, 6
SGD = partial(torch.optim.SGD, weight_decay=0.1)  # moves what has a gradient of zeros, and nothing without one

pytestmark = pytest.mark.long


class Branches(nn.Module):
    """A layer for samples whose first feature is large, which a batch often has none of; float64."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.large = nn.Linear(FEATURES, 40).double(), nn.Linear(40, 40).double()
        self.often, self.head = nn.Linear(40, 40).double(), nn.Linear(40, 1).double()
        self.drops: Iterator[bool] = iter(())

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.body(x).tanh()
        large = x[:, 0] > 1
        if large.any():
            hidden = hidden.index_put((large,), self.large(hidden[large]))
        return self.head(hidden if next(self.drops, False) else self.often(hidden))


def batch(step: int) -> Tensor:
    return torch.randn(BATCH, FEATURES, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def train(rank: Rank, trials: Sequence[Trial], micro_batches: int, drop: bool) -> list[dict[str, Tensor]]:
    """Return the parameters after training in each way."""
    found = []
    for trial in trials:
        parts = make_parts(trial)
        parts.model.drops = iter(torch.rand(1000, generator=torch.Generator().manual_seed(rank.index)) < 0.3 * drop)  # type: ignore[assignment]
        for step in range(STEPS):
            own = batch(step).tensor_split(rank.world_size)[rank.index].tensor_split(micro_batches)
            divisor = parts.sync.begin_step(BATCH // rank.world_size, BATCH)
            for i, x in enumerate(own):
                with parts.sync.micro_batch(last=i == micro_batches - 1):
                    (parts.sync.module(x).square().sum() / divisor).backward()
            parts.sync.step()
        found.append({name: value.detach().clone() for name, value in parts.model.state_dict().items()})
        parts.sync.close()
    return found


def alone(trial: Trial) -> dict[str, Tensor]:
    """Return the parameters after a plain loop on whole batches."""
    torch.manual_seed(0)
    model = Branches()
    optimizer = SGD(model.parameters(), lr=trial.lr, momentum=trial.momentum)
    skipped = 0
    for step in range(STEPS):
        (model(batch(step)).square().sum() / BATCH).backward()
        skipped += model.large.weight.grad is None
        optimizer.step()
        optimizer.zero_grad()
    assert 5 < skipped < STEPS - 5, "in some steps no rank has use for the layer"
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_branches_by_data_are_trained_as_in_one_process(micro_batches: int) -> None:
    trial = Trial("allreduce", model=Branches, optimizer=SGD, momentum=0.9)
    expected = alone(trial)
    for (state,) in run_ranks(train, 2, [trial], micro_batches, False):
        for name, value in expected.items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-12)


def test_layers_that_ranks_drop_by_chance_are_trained_by_every_codec() -> None:
    codecs = ("none", "topk(0.1)", "sign", "powersgd(rank=1)")
    trials = [Trial("allreduce", codec, model=Branches, optimizer=SGD) for codec in codecs]
    trials += [Trial(sync, model=Branches, optimizer=SGD) for sync in ("local(4)", "diloco(period=4)")]
    torch.manual_seed(0)
    before = Branches().state_dict()
    first, second = run_ranks(train, 2, trials, 1, True)
    for trial, one, other in zip(trials, first, second, strict=True):
        for name, value in one.items():
            assert value.isfinite().all() and not torch.equal(value, before[name]), f"{trial.sync}: {name}"
            assert torch.equal(value, other[name]), f"{trial.sync} {trial.compression}: replicas differ in {name}"
