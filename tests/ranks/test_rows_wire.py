"""Rows of tables on the wire: the kernel counts what was said, and little more than touched rows with their indices."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from echelon.collectives.row_exchange import RowExchange
from echelon.collectives.row_reducer import RowReducer
from echelon.compression import read as read_codec
from echelon.core.errors import UserError
from echelon.launch.link import Host, ShapedNetwork, enter, parse_link, read_counters
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


@pytest.mark.root
def test_touched_rows_are_what_the_kernel_counts() -> None:
    try:
        network = ShapedNetwork(2, parse_link("1gbit"))
    except UserError as error:
        pytest.skip(str(error))
    with network:
        ranks = run_ranks(count, 2, network.hosts, backend=None, timeout_s=90)
    for found in ranks:
        for way, (said, counted, needed) in found.items():
            assert counted == pytest.approx(said, rel=0.05), (way, said, counted)
            assert counted <= 1.2 * needed, (way, counted, needed)
