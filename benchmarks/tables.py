"""Sparse tables: samples/s and bytes of a step against a dense DistributedDataParallel loop written by hand.

python -m benchmarks.tables [--model two_tower] [--ratings ratings.csv]

2 processes on this machine, over loopback, and one of two models: DLRM's (26 columns of ids from one table) on a
generated click log, or two towers on such a log or on the ratings of a file (userId,movieId,rating). All loops have the
same batches and model; the hand-written one has a dense gradient and Adam, the others sparse gradients, SparseAdam, and
rows that travel: of whole tables, or of tables that are cut over the processes. They take turns, and each figure is the
median of its rounds. `--rows 10000000 --no-dense` leaves out the loop that may have no room.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy
import pandas
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from echelon.collectives import registry as paths
from echelon.collectives.row_exchange import RowExchange
from echelon.collectives.wire import ring_bytes
from echelon.compression import read as read_codec
from echelon.models.builtin.dlrm import DLRM
from echelon.models.builtin.two_tower import TwoTower
from echelon.models.tables import make_sparse, sparse_tables
from echelon.observe.phases import HostClock
from echelon.optim.build import TableAdam
from echelon.parallel.tables import cut_tables
from echelon.sync.base import CutRows, SyncContext
from echelon.sync.registry import read as read_sync
from echelon.torch_compat import same_ranks_group
from echelon.trainer.update import Update

RANKS, COLUMNS, NUMBERS = 2, 26, 13


@dataclass(frozen=True)
class Turns:
    """How long is measured.

    Attributes:
        batch: samples of a rank and step.
        steps: of a round.
        rounds: of each loop.
        no_dense: leave the hand-written loop out.
    """

    batch: int
    steps: int
    rounds: int
    no_dense: bool = False


@dataclass(frozen=True)
class Step:
    """One batch of a rank: inputs (B, ...) of the model and targets (B, 1)."""

    inputs: tuple[Tensor, ...]
    targets: Tensor


class Work(Protocol):
    """A model and its data."""

    label: str

    def model(self) -> nn.Module:
        """Build it."""

    def drawn(self, draw: torch.Generator, count: int) -> Step:
        """Return a batch of so many samples."""

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of each sample, from outputs and targets (B, 1)."""


@dataclass(frozen=True)
class Clicks:
    """DLRM on a generated click log: ids from one table of `rows`, few of them often and most seldom."""

    rows: int
    label: str = "dlrm"

    def model(self) -> nn.Module:
        """Build it."""
        return DLRM(NUMBERS, COLUMNS, self.rows, 1)

    def drawn(self, draw: torch.Generator, count: int) -> Step:
        """Return numbers `(B, 13)`, ids `(B, 26)` and clicks `(B, 1)`."""
        ids = (torch.rand(count, COLUMNS, generator=draw) ** 3 * self.rows).long()
        numbers = torch.randn(count, NUMBERS, generator=draw)
        return Step((ids, numbers), (numbers[:, :1] > 0).float())

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the cross-entropy."""
        return nn.functional.binary_cross_entropy_with_logits(outputs, targets, reduction="none")


@dataclass(frozen=True)
class Pairs:
    """Two towers on ratings `(N, 3)` of users and items, or on a generated log of two tables of `rows` ids each."""

    rows: int
    ratings: Tensor | None = None
    label: str = "two_tower"

    def model(self) -> nn.Module:
        """Build it."""
        return TwoTower([self.rows] * 2 if self.ratings is None else (self.ratings[:, :2].amax(0).long() + 1).tolist())

    def drawn(self, draw: torch.Generator, count: int) -> Step:
        """Return users `(B,)`, items `(B,)` and ratings `(B, 1)`."""
        if self.ratings is None:
            users, items = (torch.rand(2, count, generator=draw) ** 3 * self.rows).long()
            return Step((users, items), (users[:, None] % 2).float())
        rows = self.ratings[torch.randint(len(self.ratings), (count,), generator=draw)]
        return Step((rows[:, 0].long(), rows[:, 1].long()), rows[:, 2:])

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Return the squared error."""
        return (outputs - targets).square()


def read_ratings(file: Path) -> Tensor:
    """Return users and items, numbered from 0, and ratings `(N, 3)` of a table userId,movieId,rating,..."""
    table = pandas.read_csv(file, usecols=["userId", "movieId", "rating"])
    columns = [pandas.factorize(table[name])[0] for name in ("userId", "movieId")]
    return torch.tensor(numpy.stack([*columns, table["rating"].to_numpy()], axis=1), dtype=torch.float32)


class _Dense:
    """DistributedDataParallel and Adam, as anyone writes them."""

    def __init__(self, work: Work) -> None:
        torch.manual_seed(0)
        self._work, self._model = work, DistributedDataParallel(work.model())
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=1e-3)
        self.bytes_a_step = float(ring_bytes(sum(4 * p.numel() for p in self._model.parameters()), RANKS, on_gpu=False))

    def step(self, batch: Step) -> None:
        """Take one step."""
        loss = self._work.losses(self._model(*batch.inputs), batch.targets).mean()
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()


class _Sparse:
    """The strategy `allreduce` of this package, with sparse gradients and `sparse_adam`."""

    def __init__(self, work: Work, compression: str, is_cut: bool = False) -> None:
        torch.manual_seed(0)
        self._work, self._model = work, work.model()
        make_sparse(self._model, work.label)
        cut_rows = _cut(self._model, compression) if is_cut else None
        groups = [{"params": list(self._model.parameters()), "weight_decay": 0.0}]
        optimizer = TableAdam(groups, sparse_tables(self._model), 1e-3)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        context = SyncContext(
            model=self._model,
            update=Update(self._model, optimizer, scaler, 0.0),
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

    def step(self, batch: Step) -> None:
        """Take one step."""
        self._steps += 1
        divisor = self._sync.begin_step(len(batch.targets), RANKS * len(batch.targets))
        with self._sync.micro_batch(last=True):
            losses = self._work.losses(self._sync.module(*batch.inputs), batch.targets)
            (losses.sum() / divisor).backward()
        self._sync.step()


def _cut(model: nn.Module, compression: str) -> CutRows:
    """Cut the model's table over all processes."""
    group, codec = same_ranks_group(dist.group.WORLD), read_codec(compression).codec
    exchange = RowExchange(group, codec if codec.takes_rows else None)
    cut_tables(model, sparse_tables(model), group, exchange)
    return CutRows(exchange, None)


def _rank(rank: int, work: Work, turns: Turns, port: int) -> None:
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    loops: dict[str, _Dense | _Sparse] = {} if turns.no_dense else {"dense DDP by hand": _Dense(work)}
    loops |= {
        "sparse rows": _Sparse(work, "none"),
        "sparse rows, int8": _Sparse(work, "int8"),
        "cut rows": _Sparse(work, "none", is_cut=True),
        "cut rows, int8": _Sparse(work, "int8", is_cut=True),
    }
    draw = torch.Generator().manual_seed(rank)
    taken: dict[str, list[float]] = {name: [] for name in loops}
    for _ in range(turns.rounds + 1):  # the first one warms up
        batches = [work.drawn(draw, turns.batch) for _ in range(turns.steps)]
        for name, loop in loops.items():
            dist.barrier()
            began = time.perf_counter()
            for each in batches:
                loop.step(each)
            dist.barrier()
            taken[name].append((time.perf_counter() - began) / turns.steps)
    if rank == 0:
        _show(work, turns, loops, {name: seconds[1:] for name, seconds in taken.items()})
    dist.destroy_process_group()


def _show(work: Work, turns: Turns, loops: dict[str, _Dense | _Sparse], taken: dict[str, list[float]]) -> None:
    samples = RANKS * turns.batch
    tables = " and ".join(f"{len(each):,} x {each.shape[1]}" for each in work.model().parameters() if len(each) > 500)
    print(f"{work.label}, tables of {tables}, {samples} samples a step, {RANKS} processes")
    print("| loop | samples/s (least to most) | bytes sent a step and rank |\n|---|---|---|")
    for name, seconds in taken.items():
        middle, low, high = (samples / each for each in (statistics.median(seconds), max(seconds), min(seconds)))
        print(f"| {name} | {middle:.0f} ({low:.0f} to {high:.0f}) | {loops[name].bytes_a_step:,.0f} |")


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=("dlrm", "two_tower"), default="dlrm")
    parser.add_argument("--ratings", type=Path, help="of two_tower: a table of them; else a generated log")
    parser.add_argument("--rows", type=int, default=500_000)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--port", type=int, default=29_611)
    parser.add_argument("--no-dense", action="store_true")
    given = parser.parse_args()
    if given.ratings and given.model != "two_tower":
        parser.error("--ratings is of --model two_tower")
    ratings = read_ratings(given.ratings) if given.ratings else None
    work = Clicks(given.rows) if given.model == "dlrm" else Pairs(given.rows, ratings)
    mp.spawn(_rank, (work, Turns(given.batch, given.steps, given.rounds, given.no_dense), given.port), nprocs=RANKS)


if __name__ == "__main__":
    main()
