"""A parameter that no rank used in a step keeps no gradient, as in one process: nothing moves it, not even decay."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import echelon


class Partly(nn.Module):
    """A layer that forward leaves out, and one that only training uses."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(64, 32)
        self.forgotten = nn.Linear(32, 32)
        self.extra = nn.Linear(32, 10)
        self.head = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.body(images.flatten(1)).relu()
        return self.head(hidden) + self.extra(hidden) if self.training else self.head(hidden)


@pytest.mark.parametrize(
    ("parallel", "sync", "compression"),
    [
        pytest.param(*way, marks=mark)
        for mark, ways in (
            (pytest.mark.long, (
                ("dp=2", "allreduce", "powersgd(rank=1)"), ("dp=2", "ps(mode=sync)", "sign"),
                ("dp=2,fsdp=2", "allreduce", "none"),
            )),
            (pytest.mark.slow, (
                ("dp=2", "allreduce", "none"), ("dp=2", "allreduce", "sign"), ("dp=2", "local(2)", "none"),
                ("dp=2", "allreduce", "topk(0.1)"), ("dp=2", "diloco(period=2)", "int8"),
                ("dp=2", "ps(mode=async)", "none"), ("fsdp=2", "ps(mode=async)", "none"),
            )),
        )
        for way in ways
    ],
)  # fmt: skip
def test_it_stays_as_it_was(tmp_path: Path, parallel: str, sync: str, compression: str) -> None:
    model = Partly()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    outcome = echelon.train(
        model=model, data="digits", run=tmp_path / "run", workers=4 if "," in parallel else 2, device="cpu", threads=1,
        max_steps=6, parallel=parallel, sync=sync, compression=compression, weight_decay=0.1, lr=0.1,
    )  # fmt: skip
    after = outcome.model().state_dict()
    for name, value in before.items():
        assert torch.equal(after[name], value) == name.startswith("forgotten"), name
