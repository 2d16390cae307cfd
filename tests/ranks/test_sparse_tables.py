"""Sparse tables: as many workers do what one does, a resume has its bits, and touched rows alone are sent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.checkpoint.tree import flatten, unflatten
from echelon.collectives import registry as paths
from echelon.collectives.row_reducer import RowReducer
from echelon.compression import read as read_codec
from echelon.models.tables import counting_nothing, sparse_tables
from echelon.observe.phases import HostClock
from echelon.optim.build import TableAdam
from echelon.sync.base import Sync, SyncContext
from echelon.sync.registry import read as read_sync
from echelon.trainer.update import Update
from tests.ranks.spawn import Rank, run_ranks

ROWS, WIDTH, LOOKED_UP = 4000, 32, 3
SIZES = (13, 16, 1)  # of global batches, over and over: uneven parts, and a tail that leaves ranks without any
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=0.1),
    "sparse_adam": lambda model: TableAdam(
        [{"params": list(model.parameters()), "weight_decay": 0.0}], sparse_tables(model), 0.01
    ),
}


class Tables(nn.Module):
    """An embedding, a bag of embeddings, and a layer; float64."""

    def __init__(self, dense: bool = True) -> None:
        super().__init__()
        self.users = nn.Embedding(ROWS, WIDTH, sparse=True, dtype=torch.float64)
        self.items = nn.EmbeddingBag(ROWS, WIDTH, sparse=True, dtype=torch.float64)
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=torch.float64) if dense else nn.Identity()

    def forward(self, ids: Tensor) -> Tensor:
        return torch.tanh(self.layer(self.users(ids[:, 0])) * self.items(ids)).square().sum()


@dataclass(frozen=True)
class Setting:
    """What is trained."""

    optimizer: str
    sync: str = "allreduce"
    compression: str = "none"
    clip_norm: float = 0.0
    micro_batches: int = 1
    dense: bool = True


@dataclass(frozen=True)
class Outcome:
    """What a rank ends with, and how much it sent."""

    model: dict[str, Tensor]
    sent: int


def batch(step: int) -> Tensor:
    """Return the ids `(samples, LOOKED_UP)` of a global batch."""
    drawn = np.random.default_rng(step).integers(0, 40, (SIZES[step % len(SIZES)], LOOKED_UP))
    return torch.from_numpy(drawn * 97 % ROWS)


def train(rank: Rank, setting: Setting, steps: int, interrupted: int = 0) -> Outcome:
    """Take some steps; `interrupted`: after that many, all is built again from what was saved."""
    model, optimizer, sync = _build(rank, setting)
    sent = 0
    for step in range(steps):
        if interrupted and step == interrupted:
            saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "sync": sync.state_dict()}
            tree, tensors = flatten(saved)
            kept = unflatten(tree, {name: tensor.clone() for name, tensor in tensors.items()})
            sent += sum(sync.bytes_sent().values())
            sync.close()
            model, optimizer, sync = _build(rank, setting)
            model.load_state_dict(kept["model"])
            optimizer.load_state_dict(kept["optimizer"])
            sync.load_state_dict(kept["sync"])
        whole = batch(step)
        part = torch.tensor_split(whole, rank.world_size)[rank.index]
        divisor = sync.begin_step(len(part), len(whole))
        pieces = torch.tensor_split(part, setting.micro_batches)
        for i, ids in enumerate(pieces):
            with sync.micro_batch(last=i == len(pieces) - 1):
                if len(ids):
                    (sync.module(ids) / divisor).backward()
                else:
                    with counting_nothing(model):
                        (sync.module(torch.zeros(1, LOOKED_UP, dtype=torch.int64)) * 0.0).backward()
        sync.step()
    sent += sum(sync.bytes_sent().values())
    sync.close()
    return Outcome({name: tensor.clone() for name, tensor in model.state_dict().items()}, sent)


def _build(rank: Rank, setting: Setting) -> tuple[nn.Module, torch.optim.Optimizer, Sync]:
    torch.manual_seed(0)
    model = Tables(setting.dense)
    optimizer = OPTIMIZERS[setting.optimizer](model)
    context = SyncContext(
        model=model,
        update=Update(model, optimizer, torch.amp.GradScaler("cpu", enabled=False), setting.clip_norm),
        optimizer=optimizer,
        group=None if rank.world_size == 1 else dist.group.WORLD,
        device=torch.device("cpu"),
        compression=read_codec(setting.compression),
        path=paths.build("backend"),
        seed=3,
        clock=HostClock(),
    )
    return model, optimizer, read_sync(setting.sync).build(context)


def _worst(one: Outcome, other: Outcome) -> float:
    return max(float((one.model[name] - other.model[name]).abs().max()) for name in one.model)


@pytest.mark.parametrize(
    "setting",
    [
        Setting("sgd", clip_norm=0.05),
        Setting("adagrad", micro_batches=3),
        Setting("sparse_adam", clip_norm=0.05, micro_batches=2),
        Setting("sgd", dense=False),
    ],
    ids=str,
)
def test_three_workers_do_what_one_does(setting: Setting) -> None:
    [alone] = run_ranks(train, 1, setting, 6)
    for outcome in (together := run_ranks(train, 3, setting, 6)):
        assert _worst(alone, outcome) < 1e-9
        assert _worst(together[0], outcome) == 0.0


def test_a_row_that_was_not_touched_stays_as_it_was() -> None:
    outcome = run_ranks(train, 2, Setting("sparse_adam"), 4)[0]
    torch.manual_seed(0)
    before = Tables().state_dict()
    looked_up = torch.cat([batch(step) for step in range(4)])
    for name, ids in (("users.weight", looked_up[:, 0]), ("items.weight", looked_up)):
        moved = (outcome.model[name] != before[name]).any(1).nonzero().flatten()
        assert moved.tolist() == ids.unique().tolist()


@pytest.mark.parametrize("compression", ["none", "int8", "topk(0.1)"])
def test_a_resumed_run_has_the_same_bits(compression: str) -> None:
    setting = Setting("sparse_adam", compression=compression)
    whole, resumed = run_ranks(train, 2, setting, 6), run_ranks(train, 2, setting, 6, 3)
    assert [_worst(one, other) for one, other in zip(whole, resumed, strict=True)] == [0.0, 0.0]


@pytest.mark.parametrize("sync", ["local(2)", "local(2, start=2)", "diloco(2)", "easgd(2)"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_averages_take_tables_as_they_are(sync: str, optimizer: str) -> None:
    one, other = run_ranks(train, 2, Setting(optimizer, sync=sync), 6)
    assert all(tensor.isfinite().all() for tensor in one.model.values())
    if sync.startswith("local"):  # the sixth step ends in an average
        assert _worst(one, other) == 0.0


def reduce_rows(rank: Rank, compression: str, factor: float) -> tuple[Tensor, Tensor, int, int]:
    """Sum one table's gradients; returns the sum, what a dense sum gives, the bytes sent and the rows touched."""
    table = nn.Parameter(torch.zeros(ROWS, WIDTH))
    draw = torch.Generator().manual_seed(rank.index)
    rows = torch.randperm(ROWS, generator=draw)[: 500 * rank.index + 200]
    values = factor * torch.randn(len(rows), WIDTH, generator=draw)
    table.grad = torch.sparse_coo_tensor(rows[None], values, table.shape)
    dense = table.grad.to_dense()
    dist.all_reduce(dense)
    codec = None if compression == "none" else read_codec(compression).codec
    reducer = RowReducer({"table": table}, dist.group.WORLD, codec)
    reducer.reduce()
    assert table.grad.is_sparse
    return table.grad.to_dense(), dense, reducer.wire.total, len(rows)


@pytest.mark.parametrize(
    ("compression", "bits", "within"), [("none", 32, 1e-6), ("fp16", 16, 1e-3), ("bf16", 16, 1e-2), ("int8", 8, 3e-2)]
)
def test_touched_rows_alone_are_sent(compression: str, bits: int, within: float) -> None:
    results = run_ranks(reduce_rows, 2, compression, 1.0)
    for total, dense, sent, rows in results:
        assert torch.equal(total, results[0][0])
        assert float((total - dense).abs().max()) <= within * float(dense.abs().max()) + within
        touched_bytes = rows * (WIDTH * bits / 8 + 4)
        assert touched_bytes <= sent <= 1.2 * touched_bytes


def test_what_a_codec_cannot_hold_travels_as_it_is() -> None:
    for total, dense, _, _ in run_ranks(reduce_rows, 2, "fp16", 1e6):
        torch.testing.assert_close(total, dense)


def reduce_nothing(rank: Rank) -> tuple[bool, list[int]]:
    """Reduce a table that no rank has touched, and one that the first rank has."""
    counting_nothing_table, table = (nn.Parameter(torch.zeros(5, 2)) for _ in range(2))
    if rank.index == 0:
        table.grad = torch.sparse_coo_tensor(torch.tensor([[3, 1, 3]]), torch.ones(3, 2), table.shape)
    RowReducer({"a": counting_nothing_table, "b": table}, dist.group.WORLD).reduce()
    assert table.grad is not None
    return counting_nothing_table.grad is None, table.grad.to_dense()[:, 0].int().tolist()


def test_duplicates_are_summed_and_a_table_that_nobody_touched_has_no_gradient() -> None:
    assert run_ranks(reduce_nothing, 3) == [(True, [0, 1, 0, 2, 0])] * 3
