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
from echelon.collectives.transfer import PeerLostError
from echelon.compression import read as read_codec
from echelon.config import build
from echelon.core.errors import UserError
from echelon.data.base import Batch, DataInfo
from echelon.observe.phases import HostClock
from echelon.run.resolve import resolve
from echelon.tasks.nest import TensorSpec
from echelon.trainer.parts import build_parts
from echelon.trainer.state import seed_everything
from echelon.trainer.step import Step, StepSettings
from echelon.trainer.work import Work
from tests.laws.test_layouts import check_same_function
from tests.laws.test_layouts_checkpoints import check_reload, everything, load, save
from tests.ranks.layouts import TABLE_ROWS, HeldTensor, SumTask, Trial, assemble, held, make_trainer, make_world
from tests.ranks.spawn import Rank, fail_at, run_ranks

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


def resume(rank: Rank, folder: Path) -> bool:
    """Train on, and from a checkpoint, with rows that are rounded at random; returns whether both agree."""
    trial = Trial("tables", "dp=2,table=2", {**ROWS_ALONE, "training.ema": 0.9, "strategy.compression": "int8"})
    trainer = make_trainer(trial, rank)
    trainer.run(0, 4)
    save(trainer, folder, 4)
    trainer.run(4, 7)
    again = load(trial, rank, folder)
    again.run(4, 7)
    ends, others = everything(trainer), everything(again)
    same = all((values.values == others[name].values).all() for name, values in ends.items())
    return same and again.losses == trainer.losses[4:]


def test_a_resumed_run_rounds_rows_as_a_whole_one_does(tmp_path: Path) -> None:
    assert run_ranks(resume, 2, tmp_path) == [True, True]


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


class Clicks(SumTask):
    """One output of each pair."""

    outputs = 1

    def loss_sum(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs - targets).square().sum()


def two_tower(rank: Rank | None, parallel: str, ids: int) -> tuple[dict[str, HeldTensor], int]:
    """Build a built-in model and take a step; returns what a rank held before, and the bytes that were added at most.

    Values that are held are copied where there are few.
    """
    info = DataInfo("clicks", (), 1, 1, 64, 16, (), several=(TensorSpec((), "int64", ids), TensorSpec((), "int64", 7)))
    given = {"strategy.parallel": parallel, "model.name": "two_tower", "model.sparse_tables": True}
    config = build(None, {**given, **PLAIN, "data.batch_size": 8}).config
    world, clock, before = make_world(config, rank), HostClock(), status_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the most so far counts from now
    seed_everything(0)
    parts = build_parts(resolve(config), Work(info, Clicks()), world, clock)
    begun = held(parts) if ids < 1000 else {}
    step = Step(Clicks(), StepSettings(world.device, None, 1, 0.0, False), clock, parts.scaler, parts.split)
    draw = torch.Generator().manual_seed(world.rank)
    inputs = torch.randint(ids, (4,), generator=draw), torch.randint(7, (4,), generator=draw)
    step.forward_backward(Batch(inputs, torch.zeros(4, 1), 4 * world.size, 0), parts.sync)
    parts.sync.step()
    parts.sync.close()
    return begun, status_bytes("VmHWM") - before


def status_bytes(key: str) -> int:
    """Return a number of bytes that the kernel knows of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(f"{key}:"))


def test_a_built_in_model_begins_with_the_same_rows_however_they_are_cut() -> None:
    whole = assemble([two_tower(None, "dp=1", 50)[0]])
    cut = assemble([begun for begun, _ in run_ranks(two_tower, 2, "dp=2,table=2", 50)])
    assert whole.keys() == cut.keys() and all((whole[name] == cut[name]).all() for name in whole)
    assert abs(whole["embeddings.0.weight"].std() - 32**-0.5) < 0.02 and not whole["biases.0.weight"].any()


def added_bytes(rank: Rank | None, parallel: str, ids: int) -> int:
    """Return the bytes that a large table adds at most, in a process that has trained a small one."""
    two_tower(rank, parallel, 50)
    return two_tower(rank, parallel, ids)[1]


@pytest.mark.slow
def test_a_rank_needs_memory_for_its_part_of_a_table_alone() -> None:
    ids = 2_000_000
    table = ids * 33 * 4
    assert added_bytes(None, "dp=1", ids) > table
    for added in run_ranks(added_bytes, 4, "dp=4,table=4", ids):
        assert added < 1.25 * table / 4 + 20e6


def differ(rank: Rank) -> str:
    """Look up in other tables than the other rank; returns what is said of it."""
    exchange, part = RowExchange(dist.group.WORLD), torch.zeros(5, 2)
    exchange.fetch("first", part, (0, 5, 10), torch.tensor([1, 7]))
    try:
        exchange.fetch("second" if rank.index else "first", part, (0, 5, 10), torch.tensor([1, 7]))
    except UserError as error:
        return str(error)
    return ""


def test_ranks_that_look_up_in_different_tables_are_told() -> None:
    first, second = run_ranks(differ, 2)
    assert "rank 0 of the tables' group looks up in first, and rank 1 does not" in first
    assert "rank 1 of the tables' group looks up in second, and rank 0 does not" in second


def lose(rank: Rank) -> str:
    """Look rows up until a rank is gone; returns what is said of it."""
    exchange, part = RowExchange(dist.group.WORLD), torch.zeros(5, 2)
    for step in range(3):
        rank.reach(step=step)
        try:
            exchange.fetch("table", part, (0, 5, 10), torch.tensor([1, 7]))
        except PeerLostError as error:
            return str(error)
    return ""


def test_a_rank_that_died_is_missed() -> None:
    survivor, _ = run_ranks(lose, 2, faults=[fail_at(1, 1)])
    assert "lost a rank that it exchanges rows with" in survivor
