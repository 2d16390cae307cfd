"""Predictions from arrays by name, in whatever order and of whatever type tensors are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import echelon
from echelon.core.errors import UserError


class Pair(nn.Module):
    """Takes two inputs by name."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 2), nn.Linear(5, 2)

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        """Return logits `(B, 2)`."""
        logits: Tensor = self.first(a) + self.second(b)
        return logits


class Items(Dataset[dict[str, object]]):
    """Samples by name."""

    def __init__(self, a: Tensor, b: Tensor) -> None:
        self.a, self.b = a, b

    def __len__(self) -> int:
        return len(self.a)

    def __getitem__(self, i: int) -> dict[str, object]:
        return {"a": self.a[i], "b": self.b[i], "label": int(self.a[i].sum() > 0)}


def test_inputs_by_name_are_predicted_in_any_order(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(0)
    a, b = torch.randn(40, 3, generator=draw), torch.randn(40, 5, generator=draw)
    echelon.train(Pair(), Items(a, b), run=tmp_path / "run", epochs=1, batch_size=8, device="cpu")
    values = [
        [row.prediction.probability for row in echelon.predict(tmp_path / "run", data, model=Pair())]
        for data in ({"a": a, "b": b}, {"b": b.numpy(), "a": a.clone().requires_grad_()})
    ]
    assert len(values[0]) == 40 and values[0] == pytest.approx(values[1])
    by_place = [row.prediction.probability for row in echelon.predict(tmp_path / "run", (a, b), model=Pair())]
    assert by_place == pytest.approx(values[0])
    with pytest.raises(UserError, match="the keys a, c, not a, b"):
        list(echelon.predict(tmp_path / "run", {"a": a, "c": b}, model=Pair()))
