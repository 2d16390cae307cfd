"""A dense loop of two processes for the example of recommendation, as one writes it by hand with torch alone.

python benchmarks/_recommender_hand.py DATA MODEL BATCH STEPS     # DATA, MODEL: of examples/recommender.py

DistributedDataParallel, Adam, batches that are cut out of tensors in a random order. Prints samples/s of the last three
quarters of its steps.
"""

from __future__ import annotations

import os
import sys
import time
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from examples import recommender
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

RANKS = 2


def main(rank: int, data: str, model: str, batch: int, steps: int) -> None:
    """Train on one of the processes; `batch` samples of all of them together."""
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29633"}
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    train, _ = getattr(recommender, data)()
    user, item, _, numbers, target = train.tensors
    counts = [SimpleNamespace(count=int(column.max()) + 1) for column in (user, item)]
    described = SimpleNamespace(
        several=[*counts, None, SimpleNamespace(shape=numbers.shape[1:])],
        classes=1 if target.is_floating_point() else 2,
    )
    module = DistributedDataParallel(getattr(recommender, model)(described))
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)
    loss_of = F.mse_loss if target.is_floating_point() else F.cross_entropy
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(0))
    began = 0.0
    for step in range(steps):
        if step == steps // 4:
            dist.barrier()
            began = time.perf_counter()
        start = (step * batch) % (len(order) - batch + 1)
        rows = order[start : start + batch][rank::RANKS]
        *inputs, wanted = (column[rows] for column in train.tensors)
        loss = loss_of(module(*inputs), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    dist.barrier()
    if rank == 0:
        print((steps - steps // 4) * batch / (time.perf_counter() - began))
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(main, (*sys.argv[1:3], *map(int, sys.argv[3:5])), nprocs=RANKS)
