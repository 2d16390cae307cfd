"""Runs over data that can only be iterated: one process, two, a split model, servers, and a resume."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset

import echelon
from echelon.core.errors import UserError


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


class Divided(Points):
    """Points, of which a rank gives its share alone, as `split_dataset_by_node` does."""

    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        rank, size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
        return islice(super().__iter__(), rank, None, size)

    def __len__(self) -> int:
        return self.count // int(os.environ.get("WORLD_SIZE", 1))


@pytest.mark.long
def test_a_stream_that_divides_itself_by_rank_is_refused_on_two_workers_and_not_on_one(tmp_path: Path) -> None:
    settings = {"epochs": 1, "batch_size": 16, "model": model(), "data": (Divided(90, 1), Points(30, 2))}
    with pytest.raises(UserError, match=r"the training data gives worker 1 other items than worker 0.*leave out"):
        echelon.train(run=tmp_path / "two", workers=2, **settings)  # type: ignore[arg-type]
    one = echelon.train(run=tmp_path / "one", workers=1, **settings)  # type: ignore[arg-type]
    assert one.status == "completed"
