"""Samples/s of Echelon's training loop against a hand-written DDP script, Lightning and Accelerate.

Same model (1.2 M-parameter CNN), same samples in memory, 2 ranks x 1 thread, global batch 256, SGD with momentum. All
contenders are alive at once; a window of steps is granted to one at a time, in turn, so that all see the same machine.

    python -m benchmarks.overhead [--windows 7] [--steps 100]
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
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
from benchmarks._gated import WORLD, Contender, Gate, Windows, fit, gated, gated_run, random_images, take_turns

ABOUT = (
    "2 ranks x 1 thread, a 1.2 M-parameter CNN on 32x32, global batch 256, samples in memory; all contenders alive at "
    "once, windows granted in turn; medians of windows, ratios are medians of paired windows."
)
BATCH, SAMPLES = 256, 51200


def model() -> Any:
    """Return the model of all contenders."""
    import torch

    from echelon.models.base import ModelInput
    from echelon.models.builtin.bench_cnn import build

    torch.manual_seed(0)
    return build(ModelInput(classes=10, channels=3, image_size=32))


def _loader(rank: int) -> Any:
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    data = TensorDataset(*random_images(SAMPLES))
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
    run_of_echelon(rank, gate, fit)


def run_of_echelon(rank: int, gate: Gate, train: Callable[[Any, Any], Any]) -> None:
    """Let a loop train what all contenders train."""
    gated_run(rank, gate, train, {"data.batch_size": BATCH}, (model(), random_images(SAMPLES)))


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

    loader = DataLoader(TensorDataset(*random_images(SAMPLES)), BATCH // WORLD, shuffle=True, drop_last=True)
    net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
    assert accelerator.num_processes == WORLD
    for inputs, targets in gated(lambda: iter(loader), gate):
        loss = torch.nn.functional.cross_entropy(net(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()


CONTENDERS = {"hand-written DDP": hand_written, "Echelon": echelon, "Lightning": lightning, "Accelerate": accelerate}


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=7)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--print", action="store_true", help="leave RESULTS.md as it is")
    parser.add_argument("--only", nargs="*", default=list(CONTENDERS))
    options = parser.parse_args()
    contenders = {name: Contender(CONTENDERS[name]) for name in options.only}
    results = take_turns(contenders, options.windows, options.steps)
    append_result("overhead", {"steps": options.steps, "windows": results})
    table = render(results, options.steps)
    print(table)
    if not options.print:
        update_section(
            "Overhead of the loop", f"{environment_line(command_line('benchmarks.overhead'))}\n\n{ABOUT}\n\n{table}"
        )


def render(results: dict[str, Windows], steps: int) -> str:
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
