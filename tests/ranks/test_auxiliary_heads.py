"""Auxiliary heads, which only training uses, and a branch that few steps use: trained as in one process."""

from __future__ import annotations

from collections import namedtuple
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import echelon

CLASSES, FEATURES, RARE = 4, 6, 24  # every so many samples one takes the branch
SAMPLES, BATCH, STEPS = 192, 8, 20
AUXILIARY = 0.3  # weight of each head's loss, as GoogLeNet's authors have it

Heads = namedtuple("Heads", ["logits", "aux_logits2", "aux_logits1"])  # as torchvision's GoogLeNetOutputs


class SmallGoogLeNet(nn.Module):
    """Two auxiliary heads, and a layer for samples whose first feature is large; `taken`: whether a step had any."""

    taken: ClassVar[list[bool]] = []

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(FEATURES, 16), nn.Linear(16, 16)
        self.aux1, self.aux2 = nn.Linear(16, CLASSES), nn.Linear(16, CLASSES)
        self.rare, self.head = nn.Linear(16, 16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor | Heads:
        hidden = self.first(x).tanh()
        early = self.aux1(hidden) if self.training else None
        large = x[:, 0] > 3
        if self.training:
            self.taken.append(bool(large.any()))
        if large.any():
            hidden = hidden.index_put((large,), self.rare(hidden[large]))
        hidden = self.second(hidden).tanh()
        logits = self.head(hidden)
        return Heads(logits, self.aux2(hidden), early) if self.training else logits


def loss(outputs: Tensor | Heads, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy, those of auxiliary heads with their weight added."""
    cross_entropy = nn.functional.cross_entropy
    if isinstance(outputs, Tensor):
        return cross_entropy(outputs, targets)
    auxiliary = cross_entropy(outputs.aux_logits1, targets) + cross_entropy(outputs.aux_logits2, targets)
    return cross_entropy(outputs.logits, targets) + AUXILIARY * auxiliary


def data() -> tuple[TensorDataset, TensorDataset]:
    """Return data with a sample for the branch now and then."""
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, FEATURES, generator=draw).clamp(-2, 2)
    x[::RARE, 0] = 4
    y = torch.randint(0, CLASSES, (SAMPLES,), generator=draw)
    return TensorDataset(x, y), TensorDataset(x[:32], y[:32])


def model() -> SmallGoogLeNet:
    torch.manual_seed(0)
    return SmallGoogLeNet()


def trained(run: Path, network: nn.Module | str = "", **settings: Any) -> dict[str, Tensor]:
    """Return the values of a model that was trained for some steps, with decay of whatever has a gradient."""
    outcome = echelon.train(
        network or model(), data(), run=run, loss=loss, batch_size=BATCH, max_steps=STEPS, device="cpu", threads=1,
        lr=0.05, optimizer="momentum", weight_decay=0.1, schedule="constant", **settings,
    )  # fmt: skip
    assert outcome.status == "completed"
    return outcome.model().state_dict()


def test_two_workers_train_them_as_one_process_does(tmp_path: Path) -> None:
    one, two = trained(tmp_path / "one", workers=1), trained(tmp_path / "two", workers=2)
    taken = SmallGoogLeNet.taken[-STEPS:]  # one worker trains in this process
    assert 2 < sum(taken) < STEPS - 2, "in some steps no worker has use for the branch"
    before = model().state_dict()
    for name, value in one.items():
        assert not torch.equal(value, before[name]), name
        torch.testing.assert_close(two[name], value, rtol=1e-4, atol=1e-6)  # sums of float32 in another order


def test_a_model_by_name_gives_its_heads_to_a_loss_of_ones_own_too(tmp_path: Path) -> None:
    given, named = (
        trained(tmp_path / f"run{bool(name)}", name, workers=1) for name in ("", f"{model.__module__}:model")
    )
    for name, value in given.items():
        assert torch.equal(named[name], value), name


class Headless(SmallGoogLeNet):
    """Its heads are used by no loss, so that no step gives them a gradient."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits alone."""
        outputs = super().forward(x)
        return outputs if isinstance(outputs, Tensor) else outputs.logits


@pytest.mark.parametrize(
    "settings",
    [
        {"workers": 1},
        pytest.param({"workers": 2}, marks=pytest.mark.long),
        pytest.param({"workers": 2, "sync": "local(12)"}, marks=pytest.mark.slow),
        pytest.param({"workers": 2, "sync": "ps(mode=sync)"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_run_with_layers_that_nothing_uses_is_resumed(settings: dict[str, Any], tmp_path: Path) -> None:
    def network() -> nn.Module:
        torch.manual_seed(0)
        return Headless()

    common: dict[str, Any] = {"batch_size": BATCH, "device": "cpu", "threads": 1, "schedule": "constant", **settings}
    whole = echelon.train(network(), data(), run=tmp_path / "whole", epochs=2, **common)
    echelon.train(network(), data(), run=tmp_path / "resumed", epochs=1, **common)
    resumed = echelon.resume(tmp_path / "resumed", model=network(), data=data(), epochs=2)
    values = resumed.model().state_dict()
    for name, value in whole.model().state_dict().items():
        assert torch.equal(values[name], value), name
    assert torch.equal(values["aux1.weight"], network().state_dict()["aux1.weight"])


@pytest.mark.parametrize(
    ("sync", "compression"),
    [
        pytest.param("allreduce", "topk(0.1)", marks=pytest.mark.long),
        pytest.param("ps(mode=sync)", "none", marks=pytest.mark.long),
        pytest.param("allreduce", "int8", marks=pytest.mark.slow),
        pytest.param("local(2)", "none", marks=pytest.mark.slow),
    ],
)
def test_every_way_to_agree_trains_them(sync: str, compression: str, tmp_path: Path) -> None:
    before = model().state_dict()
    after = trained(tmp_path / "run", workers=2, sync=sync, compression=compression)
    for name, value in after.items():
        assert value.isfinite().all() and not torch.equal(value, before[name]), name
