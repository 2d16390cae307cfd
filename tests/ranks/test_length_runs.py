"""Runs over samples of different lengths from Python: one process, two, a split model, and a resume."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

import echelon


class Sentences(Dataset[Any]):
    """Tokens, and whether more of them are below 10 than not."""

    def __init__(self, count: int, seed: int) -> None:
        self.count, self.seed = count, seed

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> dict[str, Any]:
        drawn = torch.Generator().manual_seed(1000 * self.seed + i)
        ids = torch.randint(1, 20, (int(torch.randint(1, 25, (), generator=drawn)),), generator=drawn)
        return {"ids": ids, "mask": torch.ones_like(ids), "label": int((ids < 10).sum() * 2 > len(ids))}


class Flow(IterableDataset[Any]):
    """The same one after the other."""

    def __init__(self, data: Sentences) -> None:
        self.data = data

    def __iter__(self) -> Iterator[Any]:
        return (self.data[i] for i in range(len(self.data)))


class Pooled(nn.Module):
    """The mean over the tokens that are there."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 16), nn.Linear(16, 2)

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Return logits `(B, 2)` of ids and mask `(B, T)`."""
        there = mask[..., None].float()
        return self.head((self.embed(ids) * there).sum(1) / there.sum(1))


def model() -> nn.Module:
    torch.manual_seed(0)
    return Pooled()


@pytest.mark.long
@pytest.mark.parametrize("streamed", [False, True], ids=["map_style", "iterable"])
def test_samples_of_different_lengths_train_the_same_on_any_number_of_workers_and_resume(
    streamed: bool, tmp_path: Path
) -> None:
    sets = Sentences(90, 1), Sentences(31, 2)
    data: Any = tuple(Flow(each) for each in sets) if streamed else sets

    def trained(name: str, epochs: int = 2, **settings: object) -> echelon.Outcome:
        return echelon.train(
            model(), data, run=str(tmp_path / name), epochs=epochs, batch_size=16, schedule="constant", **settings
        )  # type: ignore[arg-type]

    one, two = trained("one", workers=1), trained("two", workers=2)
    half = trained("half", epochs=1, workers=2)
    resumed = echelon.resume(half.folder, model=model(), data=data, epochs=2)
    split = trained("split", parallel="fsdp=2")
    for outcome in (two, resumed, split):
        for column in ("train_loss", "eval_loss"):
            losses = outcome.history[column].tolist()[-2:]
            assert losses == pytest.approx(one.history[column].tolist(), abs=1e-5), (outcome.folder.name, column)
    weights = [outcome.model().state_dict() for outcome in (two, resumed)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0]), "a resume is exact"
