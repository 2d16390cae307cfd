"""Samples/s of Echelon's training loop against a hand-written DDP script, Lightning and Accelerate.

Same model (1.2 M-parameter CNN), same samples in memory, 2 ranks x 1 thread, global batch 256, SGD with momentum. All
contenders are alive at once; a window of steps is granted to one at a time, in turn, so that all see the same machine.

    python -m benchmarks.overhead [--windows 7] [--steps 100]
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks._common import (
    append_result,
    command_line,
    environment_line,
    markdown_table,
    median,
    paired_ratio,
    update_section,
)

ABOUT = (
    "2 ranks x 1 thread, a 1.2 M-parameter CNN on 32x32, global batch 256, samples in memory; all contenders alive at "
    "once, windows granted in turn; medians of windows, ratios are medians of paired windows."
)
WORLD, BATCH, SAMPLES = 2, 256, 51200
DEADLINE_S = 600


class Gate:
    """Lets a rank through for one window of steps at a time, and reports what the window cost."""

    def __init__(self, pipe: Connection, steps: int) -> None:
        self._pipe, self._steps, self._count = pipe, steps, 0
        self._began = (0.0, 0.0)

    def __call__(self) -> bool:
        """Call before each step; False once the benchmark is over."""
        if self._count % self._steps == 0:
            if self._count:
                self._pipe.send((time.perf_counter() - self._began[0], time.process_time() - self._began[1]))
            if not self._pipe.poll(DEADLINE_S) or not self._pipe.recv():
                return False
            self._began = (time.perf_counter(), time.process_time())
        self._count += 1
        return True


def tensors() -> Any:
    """Return (inputs, targets): random images and labels, the same in every contender."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randn(SAMPLES, 3, 32, 32, generator=generator), torch.randint(10, (SAMPLES,), generator=generator)


def model() -> Any:
    """Return the model of all contenders."""
    import torch

    from echelon.models.base import ModelInput
    from echelon.models.builtin.bench_cnn import build

    torch.manual_seed(0)
    return build(ModelInput(classes=10, channels=3, image_size=32))


def gated(batches: Callable[[], Iterator[Any]], gate: Gate) -> Iterator[Any]:
    """Repeat epochs of batches for as long as the gate lets through."""
    while True:
        for batch in batches():
            if not gate():
                return
            yield batch


def _loader(rank: int) -> Any:
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    data = TensorDataset(*tensors())
    return DataLoader(data, BATCH // WORLD, sampler=DistributedSampler(data, WORLD, rank), drop_last=True)


def hand_written(rank: int, gate: Gate) -> None:
    """The script that everyone writes."""
    import torch
    import torch.distributed as dist
    from torch.nn.parallel import DistributedDataParallel

    dist.init_process_group("gloo")
    net = DistributedDataParallel(model())
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    loss_of = torch.nn.CrossEntropyLoss()
    loader = _loader(rank)
    for step, (inputs, targets) in enumerate(gated(lambda: iter(loader), gate)):
        loss = loss_of(net(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            loss.item()


def echelon(rank: int, gate: Gate) -> None:
    """Our loop with everything it does: phases, record, curves, progress."""
    from echelon.train.loop import fit
    from echelon.train.stop import StopFlag

    gated_run(rank, gate, lambda run, cursor: fit(run, cursor, StopFlag()), Path(os.environ["BENCH_FOLDER"]))


def gated_run(rank: int, gate: Gate, train: Callable[[Any, Any], Any], path: Path) -> None:
    """Assemble a run and train it with steps that pass a gate."""
    from torch.utils.data import TensorDataset

    from echelon.config import build
    from echelon.data import from_datasets
    from echelon.observe.record import Recorder
    from echelon.train import folder as folders
    from echelon.train.assemble import Given, assemble
    from echelon.train.world import join_world

    settings = {"data.batch_size": BATCH, "training.epochs": 1000, "optimizer.lr": 0.01, "data.loaders": 0}
    settings |= {"checkpoint.every": "1000000", "optimizer.name": "momentum", "optimizer.weight_decay": 0.0}
    config = build(None, settings).config
    folders.prepare(path, config)
    data = TensorDataset(*tensors())
    given = Given(model(), from_datasets(data, TensorDataset(*(t[:64] for t in data.tensors))))
    with join_world(config) as world:
        run, cursor = assemble(config, path, world, Recorder(path if rank == 0 else None), given)
        run.train_loader = _GatedLoader(run.train_loader, gate)  # type: ignore[assignment]
        try:
            train(run, cursor)
        except EOFError:
            return


class _GatedLoader:
    """A TrainLoader whose batches pass a gate; epochs never end."""

    def __init__(self, loader: Any, gate: Gate) -> None:
        self._loader, self._gate = loader, gate
        self.batches_per_epoch = 10**9

    def epoch(self, epoch: int, start_batch: int = 0) -> Iterator[Any]:
        yield from gated(lambda: self._loader.epoch(epoch, 0), self._gate)
        raise EOFError


def lightning(rank: int, gate: Gate) -> None:
    """Lightning's Trainer, its logger and bar off."""
    import logging
    import warnings

    import lightning as pl
    import torch

    warnings.simplefilter("ignore")
    logging.getLogger("lightning").setLevel(logging.ERROR)
    os.environ["NODE_RANK"] = "0"

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model()

        def training_step(self, batch: Any, index: int) -> Any:
            return torch.nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    class Endless(torch.utils.data.IterableDataset):  # type: ignore[type-arg]
        def __iter__(self) -> Iterator[Any]:
            loader = _loader(rank)
            return gated(lambda: iter(loader), gate)

    from lightning.pytorch.plugins.environments import TorchElasticEnvironment

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=WORLD,
        strategy="ddp",
        plugins=[TorchElasticEnvironment()],
        logger=False,
        max_epochs=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(Endless(), batch_size=None))


def accelerate(rank: int, gate: Gate) -> None:
    """Accelerate's loop, under an environment as torchrun sets it."""
    import torch
    from accelerate import Accelerator

    os.environ["ACCELERATE_USE_CPU"] = "true"
    accelerator = Accelerator(cpu=True)
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    from torch.utils.data import DataLoader, TensorDataset

    loader = DataLoader(TensorDataset(*tensors()), BATCH // WORLD, shuffle=True, drop_last=True)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    assert accelerator.num_processes == WORLD
    for inputs, targets in gated(lambda: iter(loader), gate):
        loss = torch.nn.functional.cross_entropy(net(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


CONTENDERS = {"hand-written DDP": hand_written, "Echelon": echelon, "Lightning": lightning, "Accelerate": accelerate}


Contender = Callable[[str, int, int, Connection, int, str], None]
"""Is a rank of a contender: its name, rank, the port of the rendezvous, its pipe, steps of a window, a folder."""


def as_rank(rank: int, port: int, folder: str) -> None:
    """Prepare this process to be a rank, as a launcher would."""
    import torch

    torch.set_num_threads(1)
    settings = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD, "LOCAL_WORLD_SIZE": WORLD, "GROUP_RANK": 0}
    settings |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": "b", "BENCH_FOLDER": folder}
    os.environ.update({key: str(value) for key, value in settings.items()})


def as_contender(name: str, rank: int, port: int, pipe: Connection, steps: int, folder: str) -> None:
    """Be a rank of one of `CONTENDERS`."""
    as_rank(rank, port, folder)
    CONTENDERS[name](rank, Gate(pipe, steps))
    pipe.send(None)


def measure(
    names: list[str], windows: int, steps: int, contender: Contender = as_contender
) -> dict[str, list[tuple[float, float]]]:
    """Return (seconds, CPU seconds of all ranks) of each window, by contender; the first window is warm-up."""
    from torch.distributed import TCPStore

    context = mp.get_context("spawn")
    pipes: dict[str, list[Connection]] = {}
    processes = []
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            probe = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            port = probe.port
            del probe
            ends = [context.Pipe() for _ in range(WORLD)]
            pipes[name] = [ours for ours, _ in ends]
            for rank, (_, theirs) in enumerate(ends):
                arguments = (name, rank, port, theirs, steps, f"{folder}/{names.index(name)}")
                processes.append(context.Process(target=contender, args=arguments, daemon=True))
                processes[-1].start()
        results: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
        for window in range(windows + 1):
            for name in names if window % 2 else names[::-1]:
                for pipe in pipes[name]:
                    pipe.send(True)
                costs = [_receive(pipe, name) for pipe in pipes[name]]
                if window:
                    results[name].append((max(c[0] for c in costs), sum(c[1] for c in costs)))
        for process in processes:
            process.kill()
            process.join(10)
    return results


def _receive(pipe: Connection, name: str) -> tuple[float, float]:
    if not pipe.poll(DEADLINE_S):
        raise TimeoutError(f"{name} did not finish a window in {DEADLINE_S} s")
    return pipe.recv()


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=7)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--print", action="store_true", help="leave RESULTS.md as it is")
    parser.add_argument("--only", nargs="*", default=list(CONTENDERS))
    options = parser.parse_args()
    results = measure(options.only, options.windows, options.steps)
    append_result("overhead", {"steps": options.steps, "windows": results})
    table = render(results, options.steps)
    print(table)
    if not options.print:
        update_section(
            "Overhead of the loop", f"{environment_line(command_line('benchmarks.overhead'))}\n\n{ABOUT}\n\n{table}"
        )


def render(results: dict[str, list[tuple[float, float]]], steps: int) -> str:
    """Write the table."""
    base = [seconds for seconds, _ in next(iter(results.values()))]
    base_cpu = [cpu for _, cpu in next(iter(results.values()))]
    rows = []
    for name, windows in results.items():
        rate = median(BATCH * steps / seconds for seconds, _ in windows)
        cpu = median(cpu for _, cpu in windows) / steps * 1e3
        ratio = paired_ratio(base, [seconds for seconds, _ in windows])
        cpu_ratio = paired_ratio([cpu for _, cpu in windows], base_cpu)
        rows.append((name, f"{rate:.0f}", f"{ratio:.3f}", f"{cpu:.1f}", f"{cpu_ratio:.3f}"))
    header = ("contender", "samples/s", "ratio to hand-written", "CPU ms per step, both ranks", "CPU ratio")
    return markdown_table(header, rows)


if __name__ == "__main__":
    main()
