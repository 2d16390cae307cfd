"""Runs over data that can only be iterated: one process, two, a split model, servers, and a resume."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

import echelon


class Points(IterableDataset[tuple[torch.Tensor, int]]):
    """Points, and which of three directions they lie in."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        drawn = torch.Generator().manual_seed(self.seed)
        for _ in range(self.count):
            point = torch.randn(6, generator=drawn)
            yield point, int(point.view(3, 2).sum(1).argmax())


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


@pytest.mark.long
def test_a_stream_trains_the_same_on_any_number_of_workers_and_resumes(tmp_path: Path) -> None:
    data = (Points(90, 1), Points(30, 2))

    def trained(name: str, epochs: int = 2, **settings: object) -> echelon.Outcome:
        return echelon.train(
            model(), data, run=str(tmp_path / name), epochs=epochs, batch_size=16, schedule="constant", **settings
        )  # type: ignore[arg-type]

    one, two = trained("one", workers=1), trained("two", workers=2)
    half = trained("half", epochs=1, workers=2)
    resumed = echelon.resume(half.folder, model=model(), data=data, epochs=2)
    split, served = trained("split", parallel="fsdp=2"), trained("served", sync="ps(mode=async)", workers=2)
    for outcome in (two, resumed, split):
        for name in ("top1", "macro_f1", "roc_auc"):
            assert outcome.metrics[name] == pytest.approx(one.metrics[name], abs=1e-5), (outcome.folder.name, name)
    assert served.status == "completed" and served.metrics["top1"] > 0.5
