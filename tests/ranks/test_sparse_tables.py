"""Sparse tables: as many workers do what one does, a resume has its bits, and touched rows alone are sent."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.checkpoint.tree import flatten, unflatten
from echelon.collectives import registry as paths
from echelon.collectives.route import open_route
from echelon.collectives.row_reducer import RowReducer
from echelon.compression import read as read_codec
from echelon.models.tables import counting_nothing, sparse_tables
from echelon.observe.phases import HostClock
from echelon.optim.build import TableAdam
from echelon.sync.averaging.exchange import RowDraws, sum_of_rows
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
    """An embedding, a bag of embeddings, and a layer."""

    def __init__(self, dense: bool = True, sparse: bool = True, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.users = nn.Embedding(ROWS, WIDTH, sparse=sparse, dtype=dtype)
        self.items = nn.EmbeddingBag(ROWS, WIDTH, sparse=sparse, dtype=dtype)
        self.layer = nn.Linear(WIDTH, WIDTH, dtype=dtype) if dense else nn.Identity()

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
    sparse: bool = True
    evaluates: int = 0
    dtype: torch.dtype = torch.float64


@dataclass(frozen=True)
class Outcome:
    """What a rank ends with, how much it sent, and what was agreed on each time that it was looked at."""

    model: dict[str, Tensor]
    sent: int
    seen: list[Tensor]


def batch(step: int) -> Tensor:
    """Return the ids `(samples, LOOKED_UP)` of a global batch."""
    drawn = np.random.default_rng(step).integers(0, 40, (SIZES[step % len(SIZES)], LOOKED_UP))
    return torch.from_numpy(drawn * 97 % ROWS)


def train(rank: Rank, setting: Setting, steps: int, interrupted: int = 0) -> Outcome:
    """Take some steps; `interrupted`: after that many, all is built again from what was saved."""
    model, optimizer, sync = _build(rank, setting)
    sent, seen = 0, []
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
        if setting.evaluates and (step + 1) % setting.evaluates == 0:
            with sync.agreed():
                seen.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    sync.close()  # what is on its way arrives
    sent += sum(sync.bytes_sent().values())
    return Outcome({name: tensor.clone() for name, tensor in model.state_dict().items()}, sent, seen)


def _build(rank: Rank, setting: Setting) -> tuple[nn.Module, torch.optim.Optimizer, Sync]:
    torch.manual_seed(0)
    model = Tables(setting.dense, setting.sparse, setting.dtype)
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


AVERAGES = (
    "local(3)",
    "local(3, overlap=2)",
    "local(2, optimizer_state=average)",
    "diloco(3, overlap=1)",
    "diloco(4, fragments=2)",
    "easgd(2)",
)


@pytest.mark.parametrize("sync", AVERAGES)
def test_averages_of_rows_are_those_of_whole_tables(sync: str) -> None:
    rows, whole = (
        run_ranks(train, 3, Setting("adagrad", sync=sync, sparse=sparse, evaluates=2), 7) for sparse in (True, False)
    )
    for one, other in zip(rows, whole, strict=True):
        assert _worst(one, other) < 1e-9
        for seen, expected in zip(one.seen, other.seen, strict=True):
            torch.testing.assert_close(seen, expected, atol=1e-9, rtol=0)
    assert rows[0].sent < whole[0].sent / 20


@pytest.mark.parametrize("sync", ["local(3, overlap=2)", "diloco(4, fragments=2)"])
@pytest.mark.parametrize("compression", ["none", "int8", "topk(0.1)"])
def test_averages_of_rows_go_on_with_the_same_bits(sync: str, compression: str) -> None:
    setting = Setting("sparse_adam", sync=sync, compression=compression)
    expected, resumed = run_ranks(train, 2, setting, 7), run_ranks(train, 2, setting, 7, 4)
    assert [_worst(one, other) for one, other in zip(expected, resumed, strict=True)] == [0.0, 0.0]


@pytest.mark.parametrize("sync", ["local(3)", "local(3, overlap=2)", "diloco(3)", "local(3, optimizer_state=average)"])
def test_averages_send_the_rows_of_a_period(sync: str) -> None:
    setting = Setting("sparse_adam", sync=f"{sync[:-1]}, warmup=0)", dense=False)
    for rank, outcome in enumerate(run_ranks(train, 2, setting, 6)):
        touched = 0
        for first in (0, 3):
            parts = [torch.tensor_split(batch(step), 2)[rank] for step in range(first, first + 3)]
            touched += sum(len(torch.cat(ids).unique()) for ids in ([p[:, 0] for p in parts], parts))
        touched_bytes = touched * (WIDTH * 8 + 4) * (3 if "average" in sync else 1)
        assert touched_bytes <= outcome.sent <= 1.2 * touched_bytes + 2000  # counts of rows and samples, framed


def average_narrow(rank: Rank, sync_spec: str) -> tuple[int, Tensor]:
    """Average bfloat16 tables in which each rank changes many rows in the first period, and two rows in each later one;
    returns the bytes sent from the fourth period on, and what was agreed on.
    """
    model, optimizer, sync = _build(rank, Setting("sgd", sync=sync_spec, dense=False, dtype=torch.bfloat16))
    before = 0
    for step in range(12):
        if step == 6:
            before = sum(sync.bytes_sent().values())
        ids = torch.arange(600).view(-1, 3) + 300 * rank.index if step < 2 else torch.full((1, 3), 3000 + rank.index)
        sync.begin_step(len(ids), 2 * len(ids))
        optimizer.zero_grad()
        sync.module(ids).backward()
        sync.step()
    with sync.agreed():
        agreed = torch.cat([p.detach().clone() for p in model.parameters()])
    sync.close()
    return sum(sync.bytes_sent().values()) - before, agreed


@pytest.mark.parametrize("sync", ["local(2, warmup=0)", "local(2, overlap=1, warmup=0)", "diloco(2, warmup=0)"])
def test_rows_of_narrow_numbers_travel_once(sync: str) -> None:
    (sent, one), (_, other) = run_ranks(average_narrow, 2, sync)
    assert torch.equal(one, other)
    assert sent < 4 * 10 * WIDTH * 4, "the rows of the first period do not come again"


def sum_of_share(rank: Rank, share: float, weights: list[float]) -> tuple[dict[str, Tensor], dict[str, Tensor], int]:
    """Sum a table of which each rank has changed a share of the rows, and one that none has; returns also what a sum of
    whole tables is, and the bytes sent.
    """
    draw = torch.Generator().manual_seed(rank.index)
    table, weight = torch.randn(ROWS, WIDTH, generator=draw, dtype=torch.float64), weights[rank.index]
    table[torch.randperm(ROWS, generator=draw)[int(share * ROWS) :]] = 0
    tensors = {"changed": table, "still": torch.zeros(7, 3, dtype=torch.float64)}
    expected = {name: tensor * weight for name, tensor in tensors.items()}
    for tensor in expected.values():
        dist.all_reduce(tensor)
    sums, sent = sum_of_rows(open_route(paths.build("backend"), dist.group.WORLD), tensors, weight, RowDraws())
    return sums, expected, sent


@pytest.mark.parametrize(("share", "whole"), [(0.0, False), (0.1, False), (0.9, True), (1.0, True)])
def test_the_whole_table_is_summed_where_that_sends_less(share: float, whole: bool) -> None:
    results = run_ranks(sum_of_share, 4, share, [0.5, 0.25, 0.25, 0.0])
    for rank, (sums, expected, sent) in enumerate(results):
        for name, total in sums.items():
            assert torch.equal(total, results[0][0][name])
            torch.testing.assert_close(total, expected[name], rtol=1e-12, atol=1e-12)
        rows = int(share * ROWS) if rank < 3 else 0  # what weighs nothing does not travel
        n_bytes = 2 * 3 / 4 * ROWS * WIDTH * 8 if whole else 3 * rows * (WIDTH * 8 + 4)
        assert n_bytes <= sent <= 1.02 * n_bytes + 1000


def go_on_from_whole_tables(rank: Rank) -> tuple[list[str], Outcome]:
    """Load what a run saved whose tables were encoded as a whole, and take a step; returns warnings, too."""
    setting = Setting("adagrad", sync="local(2, warmup=0)", compression="topk(0.1)")
    model, _, sync = _build(rank, replace(setting, sparse=False))
    for step in range(2):
        part = torch.tensor_split(batch(step), 2)[rank.index]
        (sync.module(part) / sync.begin_step(len(part), len(batch(step)))).backward()
        sync.step()
    saved = sync.state_dict()
    assert any("users" in key for key in saved["fragments"][0]["codec"])
    later, _, on = _build(rank, setting)
    later.load_state_dict(model.state_dict())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        on.load_state_dict(saved)
    part = torch.tensor_split(batch(2), 2)[rank.index]
    (on.module(part) / on.begin_step(len(part), len(batch(2)))).backward()
    on.step()
    with on.agreed():
        agreed = {name: tensor.clone() for name, tensor in later.state_dict().items()}
    return [str(each.message) for each in caught], Outcome(agreed, 0, [])


def test_a_checkpoint_of_whole_tables_that_were_encoded_goes_on_and_says_so() -> None:
    (said, one), (_, other) = run_ranks(go_on_from_whole_tables, 2)
    assert any("when tables were averaged whole" in line for line in said), said
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
