"""The model of `benchmarks.checkpoints`, which notes when each step begins, and the loop that a user writes by hand.

python -m benchmarks._checkpoints_hand FOLDER async_save|dd|none EVERY STEPS     with RANK, WORLD_SIZE and MASTER_*
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

WIDTH, LAYERS, INPUTS, CLASSES, BATCH = 4096, 18, 64, 10, 16
PARAMETERS = INPUTS * WIDTH + LAYERS * WIDTH**2 + WIDTH * CLASSES
FOLDER_OF_STAMPS = "BENCH_STAMPS"


class Stack(nn.Module):
    """Linear layers: 303 M parameters, few activations. Notes the time and the peak of memory before each step."""

    def __init__(self, inputs: int, classes: int) -> None:
        super().__init__()
        sizes = [inputs, *[WIDTH] * (LAYERS + 1)]
        self.hidden = nn.ModuleList(nn.Linear(a, b, bias=False) for a, b in pairwise(sizes))
        self.head = nn.Linear(WIDTH, classes, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        if self.training and FOLDER_OF_STAMPS in os.environ:
            path = Path(os.environ[FOLDER_OF_STAMPS]) / f"{os.getpid()}.txt"
            with path.open("a") as file:
                file.write(f"{time.monotonic()} {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss}\n")
        values = inputs.flatten(1)
        for layer in self.hidden:
            values = torch.relu(layer(values))
        return self.head(values)  # type: ignore[no-any-return]


def wide_stack(channels: int, classes: int) -> nn.Module:
    """Return the model for images of 8 x 8."""
    return Stack(channels * INPUTS, classes)


def main(folder: Path, way: str, every: int, steps: int) -> None:
    """Train, with a checkpoint every so many steps; rank 0 writes how long each took to be on the disk."""
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net: nn.Module = wide_stack(1, CLASSES)
    net = nn.parallel.DistributedDataParallel(net) if world > 1 else net
    optimizer = torch.optim.SGD(net.parameters(), lr=0.001, momentum=0.9)
    inputs, targets = torch.randn(BATCH // world, INPUTS), torch.randint(CLASSES, (BATCH // world,))
    save, wait = _saver(folder, way, net, optimizer)
    for step in range(1, steps + 1):
        nn.functional.cross_entropy(net(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % every == 0:
            save(step)
    durable = wait()
    if rank == 0:
        (folder / "durable.json").write_text(json.dumps(durable))
    dist.destroy_process_group()


def _saver(
    folder: Path, way: str, net: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[Callable[[int], None], Callable[[], list[float]]]:
    """Return what is called for a checkpoint, and what waits for all of them: seconds until each was on the disk."""
    if way == "async_save":
        return _async_save(folder, net, optimizer)
    if way == "dd":
        return _beside_dd(folder)
    return (lambda step: None), list


def _async_save(
    folder: Path, net: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[Callable[[int], None], Callable[[], list[float]]]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    group = dist.new_group(backend="gloo")
    durable: list[float] = []
    under_way: list[Future[Any]] = []

    def save(step: int) -> None:
        for before in under_way[-1:]:
            before.result()
        began, place, older = time.monotonic(), folder / f"step-{step}", sorted(folder.glob("step-*"))
        model, moments = get_state_dict(net, optimizer)
        future = dcp.async_save({"model": model, "optimizer": moments}, checkpoint_id=place, process_group=group)
        assert isinstance(future, Future)

        def written(done: Future[Any]) -> None:
            durable.append(time.monotonic() - began)
            if dist.get_rank() == 0:
                for path in older:
                    shutil.rmtree(path)

        future.add_done_callback(written)
        under_way.append(future)

    def wait() -> list[float]:
        for future in under_way[-1:]:
            future.result()
        return durable

    return save, wait


def _beside_dd(folder: Path) -> tuple[Callable[[int], None], Callable[[], list[float]]]:
    durable: list[float] = []
    threads: list[threading.Thread] = []

    def write() -> None:
        began = time.monotonic()
        write_by_dd(folder / "zeros", PARAMETERS * 8)
        durable.append(time.monotonic() - began)

    def save(step: int) -> None:
        if dist.get_rank() == 0:
            threads.append(threading.Thread(target=write))
            threads[-1].start()

    def wait() -> list[float]:
        for thread in threads:
            thread.join()
        return durable

    return save, wait


def write_by_dd(path: Path, n_bytes: int) -> float:
    """Write so many bytes as dd does, with a fsync, and remove them; returns the seconds."""
    began = time.perf_counter()
    command = ["dd", "if=/dev/zero", f"of={path}", "bs=4M", f"count={round(n_bytes / (4 << 20))}", "conv=fsync"]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL)
    seconds = time.perf_counter() - began
    path.unlink()
    return seconds


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
