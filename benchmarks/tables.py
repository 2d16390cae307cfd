"""Sparse tables: samples/s and bytes of a step against a dense DistributedDataParallel loop written by hand.

python -m benchmarks.tables

A generated click log, DLRM's kind of model (26 columns of ids from one table), 2 processes on this machine, over
loopback. All loops have the same batches and model; the hand-written one has a dense gradient and Adam, the others
sparse gradients, SparseAdam, and rows that travel: of whole tables, or of one that is cut over the processes. They take
turns, and each figure is the median of its rounds. `--rows 10000000 --no-dense` leaves out the loop that has no room.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from echelon.collectives import registry as paths
from echelon.collectives.row_exchange import RowExchange
from echelon.collectives.wire import ring_bytes
from echelon.compression import read as read_codec
from echelon.models.builtin.dlrm import DLRM
from echelon.models.tables import make_sparse, sparse_tables
from echelon.observe.phases import HostClock
from echelon.optim.build import TableAdam
from echelon.parallel.tables import cut_tables
from echelon.sync.base import CutRows, SyncContext
from echelon.sync.registry import read as read_sync
from echelon.torch_compat import same_ranks_group
from echelon.trainer.step import make_update

RANKS, COLUMNS, NUMBERS = 2, 26, 13


@dataclass(frozen=True)
class Log:
    """A generated click log.

    Attributes:
        rows: of the table.
        batch: samples of a rank and step.
        steps: of a round.
        rounds: of each loop.
        no_dense: leave the hand-written loop out.
    """

    rows: int
    batch: int
    steps: int
    rounds: int
    no_dense: bool = False

    def drawn(self, step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return ids `(B, 26)`, few of them often and most seldom, numbers `(B, 13)` and clicks `(B, 1)`."""
        draw = torch.Generator().manual_seed(step * RANKS + rank)
        ids = (torch.rand(self.batch, COLUMNS, generator=draw) ** 3 * self.rows).long()
        numbers = torch.randn(self.batch, NUMBERS, generator=draw)
        return ids, numbers, (numbers[:, :1] > 0).float()


class _Dense:
    """DistributedDataParallel and Adam, as anyone writes them."""

    def __init__(self, log: Log) -> None:
        torch.manual_seed(0)
        self._model = DistributedDataParallel(DLRM(NUMBERS, COLUMNS, log.rows, 1))
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=1e-3)
        self.bytes_a_step = float(ring_bytes(sum(4 * p.numel() for p in self._model.parameters()), RANKS, on_gpu=False))

    def step(self, ids: torch.Tensor, numbers: torch.Tensor, clicks: torch.Tensor) -> None:
        """Take one step."""
        loss = nn.functional.binary_cross_entropy_with_logits(self._model(ids, numbers), clicks)
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()


class _Sparse:
    """The strategy `allreduce` of this package, with sparse gradients and `sparse_adam`."""

    def __init__(self, log: Log, compression: str, is_cut: bool = False) -> None:
        torch.manual_seed(0)
        self._model = DLRM(NUMBERS, COLUMNS, log.rows, 1)
        make_sparse(self._model, "dlrm")
        cut_rows = _cut(self._model, compression) if is_cut else None
        groups = [{"params": list(self._model.parameters()), "weight_decay": 0.0}]
        optimizer = TableAdam(groups, sparse_tables(self._model), 1e-3)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        context = SyncContext(
            model=self._model,
            update=make_update(self._model, optimizer, scaler, 0.0),
            optimizer=optimizer,
            group=dist.group.WORLD,
            device=torch.device("cpu"),
            compression=read_codec(compression),
            path=paths.build("backend"),
            seed=0,
            clock=HostClock(),
            cut_rows=cut_rows,
        )
        self._sync, self._steps = read_sync("allreduce").build(context), 0

    @property
    def bytes_a_step(self) -> float:
        """Bytes that this rank has sent, by step."""
        return sum(self._sync.bytes_sent().values()) / self._steps

    def step(self, ids: torch.Tensor, numbers: torch.Tensor, clicks: torch.Tensor) -> None:
        """Take one step."""
        self._steps += 1
        divisor = self._sync.begin_step(len(ids), RANKS * len(ids))
        with self._sync.micro_batch(last=True):
            outputs = self._sync.module(ids, numbers)
            loss = nn.functional.binary_cross_entropy_with_logits(outputs, clicks, reduction="sum") / divisor
            loss.backward()
        self._sync.step()


def _cut(model: nn.Module, compression: str) -> CutRows:
    """Cut the model's table over all processes."""
    group, codec = same_ranks_group(dist.group.WORLD), read_codec(compression).codec
    exchange = RowExchange(group, codec if codec.takes_rows else None)
    cut_tables(model, sparse_tables(model), group, exchange)
    return CutRows(exchange, None)


def _rank(rank: int, log: Log, port: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    loops: dict[str, _Dense | _Sparse] = {} if log.no_dense else {"dense DDP by hand": _Dense(log)}
    loops |= {
        "sparse rows": _Sparse(log, "none"),
        "sparse rows, int8": _Sparse(log, "int8"),
        "cut rows": _Sparse(log, "none", is_cut=True),
        "cut rows, int8": _Sparse(log, "int8", is_cut=True),
    }
    taken: dict[str, list[float]] = {name: [] for name in loops}
    for round_ in range(log.rounds + 1):  # the first one warms up
        batches = [log.drawn(round_ * log.steps + i, rank) for i in range(log.steps)]
        for name, loop in loops.items():
            dist.barrier()
            began = time.perf_counter()
            for each in batches:
                loop.step(*each)
            dist.barrier()
            taken[name].append((time.perf_counter() - began) / log.steps)
    if rank == 0:
        _show(log, loops, {name: seconds[1:] for name, seconds in taken.items()})
    dist.destroy_process_group()


def _show(log: Log, loops: dict[str, _Dense | _Sparse], taken: dict[str, list[float]]) -> None:
    samples = RANKS * log.batch
    print(f"table of {log.rows} rows of 16, {samples} samples a step, {RANKS} processes")
    print("| loop | samples/s (least to most) | bytes sent a step and rank |\n|---|---|---|")
    for name, seconds in taken.items():
        middle, low, high = (samples / each for each in (statistics.median(seconds), max(seconds), min(seconds)))
        print(f"| {name} | {middle:.0f} ({low:.0f} to {high:.0f}) | {loops[name].bytes_a_step:.0f} |")


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--port", type=int, default=29_611)
    parser.add_argument("--no-dense", action="store_true")
    given = parser.parse_args()
    log = Log(given.rows, given.batch, given.steps, given.rounds, given.no_dense)
    mp.spawn(_rank, (log, given.port), nprocs=RANKS)


if __name__ == "__main__":
    main()
