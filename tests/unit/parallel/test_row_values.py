"""Rows of a table begin with values of their own, as the model draws them, whoever makes them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from echelon.parallel.deferred_init import without_memory
from echelon.parallel.row_values import RowDraw, fill_rows


class Tables(nn.Module):
    """Tables that are drawn in some ways."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Embedding(50, 8)
        self.padded = nn.Embedding(50, 8, padding_idx=3)
        self.narrow = nn.Embedding(50, 8)
        nn.init.normal_(self.narrow.weight, 0.5, 0.01)
        self.even = nn.Embedding(50, 8)
        nn.init.uniform_(self.even.weight, -2.0, 3.0)
        self.bias = nn.Embedding(50, 1)
        nn.init.zeros_(self.bias.weight)
        self.truncated = nn.Embedding(50, 8)
        nn.init.trunc_normal_(self.truncated.weight)
        self.scaled = nn.Embedding(50, 8)
        with torch.no_grad():
            self.scaled.weight.mul_(0.1)


def draw_of(name: str) -> RowDraw | None:
    with without_memory() as recording:
        model = Tables()
    return RowDraw.of(recording, getattr(model, name).weight)


def rows(draw: RowDraw, first: int, count: int, seed: int = 1, name: str = "a", width: int = 8) -> Tensor:
    made = torch.empty(count, width)
    fill_rows(made, first, draw, seed, name)
    return made


@pytest.mark.parametrize(
    ("name", "draw"),
    [
        ("plain", RowDraw("normal", 0.0, 1.0)),
        ("padded", RowDraw("normal", 0.0, 1.0, {3: 0.0})),
        ("narrow", RowDraw("normal", 0.5, 0.01)),
        ("even", RowDraw("uniform", -2.0, 3.0)),
        ("bias", RowDraw("constant", 0.0, 0.0)),
        ("truncated", None),
        ("scaled", None),
    ],
)
def test_how_a_model_draws_a_table_is_found(name: str, draw: RowDraw | None) -> None:
    assert draw_of(name) == draw


def test_a_row_does_not_depend_on_others_but_on_seed_and_name() -> None:
    draw = RowDraw("normal", 0.0, 1.0, {3: 0.0})
    whole = rows(draw, 0, 50)
    assert torch.equal(torch.cat([rows(draw, 0, 3), rows(draw, 3, 30), rows(draw, 33, 17)]), whole)
    assert not whole[3].any() and whole[4].all()
    assert not torch.equal(rows(draw, 0, 50, seed=2), whole) and not torch.equal(rows(draw, 0, 50, name="b"), whole)


def test_values_are_distributed_as_the_model_draws_them() -> None:
    normal = rows(RowDraw("normal", 0.5, 2.0), 7, 40_000).double()
    moments = [float(((normal - 0.5) / 2).pow(k).mean()) for k in (1, 2, 3, 4)]
    assert moments == pytest.approx([0.0, 1.0, 0.0, 3.0], abs=0.05)
    neighbours = [(normal[:-1] * normal[1:]).mean() - 0.25, (normal[:, :-1] * normal[:, 1:]).mean() - 0.25]
    assert all(abs(float(each)) < 0.05 for each in neighbours)
    uniform = rows(RowDraw("uniform", -2.0, 3.0), 0, 40_000)
    assert -2.0 <= float(uniform.min()) < -1.99 and 2.99 < float(uniform.max()) <= 3.0
    assert float(uniform.mean()) == pytest.approx(0.5, abs=0.02)
