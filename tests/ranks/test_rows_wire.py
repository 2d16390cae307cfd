"""Rows of tables on the wire: the kernel counts what was said, and little more than touched rows with their indices."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.collectives import registry as paths
from echelon.collectives.row_exchange import RowExchange
from echelon.collectives.row_reducer import RowReducer
from echelon.compression import read as read_codec
from echelon.coordinator.config import TrainingPlan
from echelon.coordinator.messages import TrainTask
from echelon.core.errors import UserError
from echelon.core.files import write_atomic
from echelon.launch.link import Host, ShapedNetwork, enter, parse_link, read_counters
from echelon.observe.phases import HostClock
from echelon.parallel.row_values import RowDraw
from echelon.ps.table import RowStart
from echelon.sync.base import SyncContext
from echelon.sync.ps import ServerSettings
from echelon.sync.registry import read as read_sync
from tests.ranks.server.roles import Cluster
from tests.ranks.spawn import Rank, run_ranks

ROWS, WIDTH, TOUCHED, STEPS = 100_000, 64, 3000, 4
Counted = tuple[int, int, float]
"""Bytes by our count and by the kernel's, and those of the rows that had to travel, with an index each."""


def count(rank: Rank, hosts: list[Host]) -> dict[str, Counted]:
    """Send rows of a whole table, and of one that is cut, as they are and by codecs."""
    enter(hosts[rank.index])
    store = dist.FileStore(str(rank.folder / "store"), rank.world_size)
    dist.init_process_group("gloo", store=store, rank=rank.index, world_size=rank.world_size, timeout=rank.timeout)
    found = {}
    for spec, bits in (("none", 32), ("fp16", 16), ("int8", 8)):
        for way in ("whole", "cut"):
            found[f"{way} {spec}"] = _sent(rank, hosts[rank.index], way, spec, bits)
    return found


def _sent(rank: Rank, host: Host, way: str, spec: str, bits: int) -> Counted:
    codec = None if spec == "none" else read_codec(spec).codec
    draw = torch.Generator().manual_seed(rank.index)
    table = nn.Parameter(torch.zeros(ROWS, WIDTH))
    reducer, exchange = RowReducer({"table": table}, dist.group.WORLD, codec), RowExchange(dist.group.WORLD, codec)
    part, needed = torch.zeros(ROWS // 2, WIDTH), 0.0
    said = before = None
    for step in range(STEPS + 1):
        if step == 1:  # the first one made connections
            dist.barrier()
            said, before, needed = reducer.wire.total + exchange.wire.total, read_counters(host), 0.0
        rows = torch.randperm(ROWS, generator=draw)[:TOUCHED].sort().values
        values = torch.randn(TOUCHED, WIDTH, generator=draw)
        if way == "whole":
            table.grad = torch.sparse_coo_tensor(rows[None], values, table.shape)
            reducer.reduce()
            needed += TOUCHED * (WIDTH * bits / 8 + 4)
        else:
            needed += _cut_step(exchange, part, rows, values, bits)
    dist.barrier()
    assert said is not None and before is not None
    return (
        reducer.wire.total + exchange.wire.total - said,
        (read_counters(host) - before).sent_payload_bytes,
        needed,
    )


def _cut_step(exchange: RowExchange, part: Tensor, rows: Tensor, gradients: Tensor, bits: int) -> float:
    """Look rows up and send gradients back; returns the bytes of what this rank had to send, indices both ways."""
    _, route = exchange.fetch("table", part, (0, ROWS // 2, ROWS), rows)
    exchange.send_back(route, gradients)
    rank = dist.get_rank()
    return route.asked[1 - rank] * (4 * WIDTH + 4) + route.wanted[1 - rank] * (WIDTH * bits / 8 + 4)


def averaged(rank: Rank, hosts: list[Host]) -> dict[str, Counted]:
    """Average a table of which each replica has touched some rows, as they are and by a codec."""
    enter(hosts[rank.index])
    store = dist.FileStore(str(rank.folder / "store"), rank.world_size)
    dist.init_process_group("gloo", store=store, rank=rank.index, world_size=rank.world_size, timeout=rank.timeout)
    ways = [("local(2, warmup=0)", "none", 32), ("diloco(2, warmup=0)", "none", 32), ("local(2, warmup=0)", "fp16", 16)]
    ways.append(("local(2, overlap=1, warmup=0)", "int8", 8))
    return {f"{sync} {spec}": _averaged(rank, hosts[rank.index], sync, spec, bits) for sync, spec, bits in ways}


def _averaged(rank: Rank, host: Host, sync: str, spec: str, bits: int) -> Counted:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(ROWS, WIDTH, sparse=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def update() -> None:
        """Step and clear."""
        optimizer.step()
        optimizer.zero_grad()

    context = SyncContext(
        model=model, update=update, optimizer=optimizer, group=dist.group.WORLD, device=torch.device("cpu"),
        compression=read_codec(spec), path=paths.build("backend"), seed=3, clock=HostClock(),
    )  # fmt: skip
    strategy, draw = read_sync(sync).build(context), torch.Generator().manual_seed(rank.index)
    touched: list[Tensor] = []
    said, before, periods = 0, None, STEPS
    for step in range(2 * periods + 3):
        if step == 3:  # the first agreement made connections, and has landed
            dist.barrier()
            said, before, touched = sum(strategy.bytes_sent().values()), read_counters(host), touched[2:]
        touched.append(torch.randperm(ROWS, generator=draw)[: TOUCHED // 2])
        divisor = strategy.begin_step(TOUCHED // 2, TOUCHED)
        with strategy.micro_batch(last=True):
            (strategy.module(touched[-1]).square().sum() / divisor).backward()
        strategy.step()
    strategy.close()
    dist.barrier()
    assert before is not None
    needed = sum(len(torch.cat(touched[i : i + 2]).unique()) for i in range(0, 2 * periods, 2)) * (WIDTH * bits / 8 + 4)
    counted = (read_counters(host) - before).sent_payload_bytes
    return sum(strategy.bytes_sent().values()) - said, counted, needed


SERVED_STEPS = 20
TABLE = RowStart(RowDraw("normal", 0.0, 1.0), 3, "0.weight")


def served(rank: Rank, hosts: list[Host], spec: str, bits: int) -> tuple[float, float] | None:
    """Serve a table on one host, and train rows of it on the other one; returns, of the worker, the bytes that the
    kernel counted both ways as a share of those that had to travel.
    """
    enter(hosts[rank.index])
    written = rank.folder / "address"
    plan = TrainingPlan(1, SERVED_STEPS + 1, 0, None, None)
    cluster = Cluster(
        rank.folder, ServerSettings(servers=2), sgd, plan, compression=spec, starts={TABLE.name: TABLE},
        host=hosts[0].address,
    )  # fmt: skip
    if rank.index == 0:
        cluster.start()
        write_atomic(written, cluster.address)
        cluster.stop(60)
        return None
    ends = time.monotonic() + rank.timeout.total_seconds()
    while not written.exists():
        assert time.monotonic() < ends, "no server told its address"
        time.sleep(0.01)
    cluster.address = written.read_text()
    model = nn.Sequential(nn.Embedding(ROWS, WIDTH, sparse=True))
    model[0].weight = nn.Parameter(torch.empty(0, WIDTH))
    counters: list[Any] = []

    def gradient(module: nn.Module, task: TrainTask) -> float:
        """Touch some rows."""
        counters.append(read_counters(hosts[1]))
        rows = torch.randperm(ROWS, generator=torch.Generator().manual_seed(task.step))[:TOUCHED]
        loss = module(rows).square().sum() / TOUCHED
        loss.backward()
        return float(loss.detach())

    cluster.work_here(0, model, gradient, 0.1, [])
    found = counters[-1] - counters[0]
    pushed, pulled = SERVED_STEPS * TOUCHED * (4 + WIDTH * bits / 8), SERVED_STEPS * TOUCHED * (4 + WIDTH * 4)
    return found.sent_payload_bytes / pushed, found.received_payload_bytes / pulled


def sgd(tensors: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(tensors, lr=0.1)


@pytest.mark.root
@pytest.mark.parametrize("measured", [count, averaged], ids=["summed", "averaged"])
def test_touched_rows_are_what_the_kernel_counts(measured: Callable[..., dict[str, Counted]]) -> None:
    try:
        network = ShapedNetwork(2, parse_link("1gbit"))
    except UserError as error:
        pytest.skip(str(error))
    with network:
        ranks = run_ranks(measured, 2, network.hosts, backend=None, timeout_s=90)
    for found in ranks:
        for way, (said, counted, needed) in found.items():
            assert counted == pytest.approx(said, rel=0.05), (way, said, counted)
            assert counted <= 1.2 * needed, (way, counted, needed)


@pytest.mark.root
@pytest.mark.parametrize(("spec", "bits"), [("none", 32), ("fp16", 16), ("int8", 8)])
def test_a_worker_and_servers_exchange_touched_rows_by_the_kernel(spec: str, bits: int) -> None:
    try:
        network = ShapedNetwork(2, parse_link("1gbit"))
    except UserError as error:
        pytest.skip(str(error))
    with network:
        _, shares = run_ranks(served, 2, network.hosts, spec, bits, backend=None, timeout_s=90)
    assert shares is not None
    sure = 1 - 1 / SERVED_STEPS  # the last push may be on its way yet
    assert all(0.9 * sure < share <= 1.2 * sure for share in shares), shares
