"""What does not go together with sparse tables is refused in one line, with the fix."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

from echelon.config import build
from echelon.core.errors import UserError
from echelon.models.tables import check_tables, make_sparse
from echelon.parallel.row_values import RowDraw
from echelon.ps.table import RowStart
from echelon.run.resolve import resolve
from echelon.trainer.compatibility import check_strategies
from echelon.trainer.tables import check_sparse_model, table_notes, whole_table_notes

ROWS_ALONE = {"optimizer.name": "sparse_adam", "optimizer.weight_decay": 0.0, "model.sparse_tables": True}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"optimizer.name": "adamw"}, "use sparse_adam, adagrad or sgd --momentum 0"),
        ({"optimizer.name": "mine:Own"}, "--optimizer mine:Own is none"),
        ({"optimizer.name": "sgd"}, "add --momentum 0"),
        ({"optimizer.weight_decay": 0.01}, "add --weight-decay 0"),
        ({"strategy.sync": "ps(by_staleness=true)"}, "by_staleness and decay_s need the whole table"),
        ({"strategy.sync": "ps", "optimizer.clip_norm": 1.0}, "and --clip-norm 1 does not work yet"),
        ({"strategy.sync": "ps", "training.ema": 0.9}, "and --ema 0.9 does not work yet"),
        ({"strategy.sync": "ps", "training.precision": "bf16-params"}, "bf16-params does not work yet"),
        ({"strategy.parallel": "fsdp=2"}, "--parallel fsdp=2 does not work yet"),
        ({"strategy.parallel": "dp=2,zero1"}, "does not work yet"),
        ({"model.compile": True}, "--compile does not work yet"),
    ],
)
def test_choices_that_touch_other_rows_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words) as refusal:
        check_strategies(resolve(build(None, {**ROWS_ALONE, **settings}).config), 2)
    assert "\n" not in str(refusal.value) and "leave out --sparse-tables" in str(refusal.value)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"optimizer.name": "adagrad"},
        {"optimizer.name": "sgd", "optimizer.momentum": 0.0},
        {"strategy.compression": "int8"},
        {"strategy.compression": "topk(0.01)"},
        {"strategy.sync": "local(8)"},
        {"strategy.sync": "ps(servers=2)"},
        {"strategy.sync": "ps(mode=sync)"},
        {"strategy.sync": "ps", "strategy.compression": "int8"},
        {"strategy.parallel": "dp=2,table=2"},
        {"strategy.parallel": "dp=2,table=2", "strategy.compression": "int8", "optimizer.clip_norm": 1.0},
    ],
)
def test_the_others_are_not(settings: dict[str, Any]) -> None:
    check_strategies(resolve(build(None, {**ROWS_ALONE, **settings}).config), 2)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(9, 4, sparse=True)
        self.head = nn.Linear(4, 9, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        out: Tensor = self.head(self.table(ids))
        return out


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (nn.Sequential(nn.Embedding(9, 4, sparse=True, max_norm=1.0)), "max_norm"),
        (nn.Sequential(nn.Embedding(9, 4, sparse=True, scale_grad_by_freq=True)), "scale_grad_by_freq"),
        (nn.Sequential(nn.EmbeddingBag(9, 4, sparse=True, mode="max")), "mode='max'"),
        (Tied(), "head.weight, too"),
    ],
)
def test_tables_whose_gradients_cannot_be_rows_are_refused(model: nn.Module, words: str) -> None:
    with pytest.raises(UserError, match=words):
        check_tables(model, "model M")


def test_tables_are_cut_where_there_are_some() -> None:
    run = resolve(build(None, {"strategy.parallel": "dp=2,table=2"}).config)
    with pytest.raises(UserError, match="no sparse tables that are trained and could be cut: add --sparse-tables"):
        check_sparse_model(nn.Embedding(9, 4), run, 2)


def test_a_model_without_tables_is_refused() -> None:
    with pytest.raises(UserError, match=r"no nn\.Embedding"):
        make_sparse(nn.Linear(2, 2), "model Linear")


def test_a_run_says_where_servers_are_given_whole_tables() -> None:
    run = resolve(build(None, {**ROWS_ALONE, "strategy.sync": "ps"}).config)
    table = nn.Embedding(5, 2, sparse=True)
    (note,) = whole_table_notes(run, table, {})
    assert note.startswith("--sync ps: each worker has memory for whole tables")
    assert not whole_table_notes(run, table, {"weight": RowStart(RowDraw("normal", 0.0, 1.0), 0, "weight")})
    assert not whole_table_notes(run, nn.Linear(2, 2), {})


@pytest.mark.parametrize(("codec", "says"), [("none", False), ("int8", False), ("fp16", False), ("topk(0.01)", True)])
def test_a_codec_that_takes_no_rows_leaves_those_of_servers_as_they_are_and_it_is_said(codec: str, says: bool) -> None:
    settings = {**ROWS_ALONE, "strategy.sync": "ps", "strategy.compression": codec}
    notes = table_notes(resolve(build(None, settings).config), nn.Embedding(9, 4, sparse=True), 1)
    assert ["rows travel as they are" in note for note in notes] == [True] * says
