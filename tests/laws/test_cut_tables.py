"""Tables that are cut by rows over replicas: the same function, the same checkpoints, and touched rows alone travel."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from echelon.collectives.row_exchange import RowExchange
from echelon.compression import read as read_codec
from tests.laws.test_layouts import check_same_function
from tests.laws.test_layouts_checkpoints import check_reload
from tests.ranks.layouts import TABLE_ROWS, Trial, held, make_trainer
from tests.ranks.spawn import Rank, run_ranks

ROWS, WIDTH = 4000, 32
ROWS_ALONE: Mapping[str, Any] = {"optimizer.name": "sparse_adam", "optimizer.lr": 0.01, "optimizer.weight_decay": 0.0}
PLAIN: Mapping[str, Any] = {"optimizer.name": "sgd", "optimizer.momentum": 0.0, "optimizer.weight_decay": 0.0}
CLIPPED: Mapping[str, Any] = {"optimizer.clip_norm": 0.3, "training.accumulate": 2, "training.ema": 0.9}
ADAGRAD: Mapping[str, Any] = {"optimizer.name": "adagrad", "optimizer.lr": 0.1, "optimizer.weight_decay": 0.0}


def test_cut_over_two_replicas_they_learn_what_one_process_does() -> None:
    trials = [
        Trial("tables", "dp=2,table=2", {**ROWS_ALONE, **CLIPPED}),
        Trial("tables", "dp=2,table=2", PLAIN, deals=((3, 1), (1, 7), (0, 1))),
        Trial("tables", "dp=2,table=2", {**ADAGRAD, "optimizer.clip_norm": 0.2}),
    ]
    check_same_function(trials, 2, steps=6)


@pytest.mark.long
def test_cut_over_four_replicas_or_two_pairs_of_them() -> None:
    trials = [Trial("tables", f"dp=4,table={n}", {**ROWS_ALONE, **CLIPPED}) for n in (1, 2, 4)]
    check_same_function(trials, 4, steps=6)


@pytest.mark.long
def test_a_checkpoint_loads_with_tables_cut_otherwise_and_goes_on_with_its_bits(tmp_path: Path) -> None:
    check_reload("tables", {2: ["dp=2", "dp=2,table=2"], 4: ["dp=4,table=2", "dp=4,table=4"]}, tmp_path)


def exchange(rank: Rank, compression: str) -> tuple[Tensor, Tensor, int, int, int]:
    """Look rows up and send gradients back; returns their sum here, a dense sum's, bytes of both ways, and rows."""
    whole = torch.arange(ROWS * WIDTH, dtype=torch.float32).view(ROWS, WIDTH)
    bounds = (0, ROWS // 3, ROWS)
    own = slice(bounds[rank.index], bounds[rank.index + 1])
    codec = None if compression == "none" else read_codec(compression).codec
    exchange = RowExchange(dist.group.WORLD, codec)
    draw = torch.Generator().manual_seed(rank.index)
    rows = torch.randperm(ROWS, generator=draw)[: 900 - 300 * rank.index].sort().values
    values, route = exchange.fetch("table", whole[own], bounds, rows)
    assert torch.equal(values, whole[rows])
    forward = exchange.wire.total
    gradients = torch.randn(len(rows), WIDTH, generator=draw)
    dense = torch.zeros(ROWS, WIDTH).index_add_(0, rows, gradients)
    dist.all_reduce(dense)
    found = exchange.send_back(route, gradients)
    total = torch.zeros(ROWS, WIDTH)[own].index_add_(0, found.indices, found.values)
    elsewhere = len(rows) - route.wanted[rank.index]
    return total, dense[own], forward, exchange.wire.total - forward, elsewhere


@pytest.mark.parametrize(("compression", "bits", "within"), [("none", 32, 1e-6), ("fp16", 16, 1e-3), ("int8", 8, 3e-2)])
def test_rows_of_others_alone_travel(compression: str, bits: int, within: float) -> None:
    results = run_ranks(exchange, 2, compression)
    for total, dense, _, _, _ in results:
        assert float((total - dense).abs().max()) <= within * float(dense.abs().max())
    forward, backward, rows = (sum(result[i] for result in results) for i in (2, 3, 4))
    assert rows * (4 * WIDTH + 4) <= forward <= 1.2 * rows * (4 * WIDTH + 4)
    assert rows * WIDTH * bits / 8 <= backward <= 1.2 * rows * (WIDTH * bits / 8 + 4)


def hold(rank: Rank) -> tuple[list[int], list[int], bool]:
    """Return the rows that a rank holds and has moments of, and whether it looked one up that it has not."""
    trainer = make_trainer(Trial("tables", "dp=4,table=4", ROWS_ALONE), rank)
    trainer.run(0, 1)
    tables = trainer.parts.model.users, trainer.parts.model.items
    moments = [len(trainer.parts.optimizer.state[table.weight]["exp_avg"]) for table in tables]
    with pytest.raises(IndexError, match=f"users.weight has no row {TABLE_ROWS}"):
        tables[0](torch.tensor([TABLE_ROWS]))
    return [len(table.weight) for table in tables], moments, len(held(trainer.parts)["users.weight"].values) < 9


def test_a_rank_holds_a_quarter_of_the_rows_and_their_moments() -> None:
    for rank, (rows, moments, is_part) in enumerate(run_ranks(hold, 4)):
        assert rows == moments == [8 if rank < 2 else 7, 10 if rank < 2 else 9] and is_part
