"""Samples/s of each layout on two processes, against one process and a hand-written script of the same torch parts.

    python -m benchmarks.layouts [--windows 4] [--steps 6] [--only dp fsdp zero1 tp pp]

A small ViT, the same samples in memory, one thread a process, SGD with momentum, the same global batch. One process,
the script and Echelon are alive at once; a window of steps is granted to one at a time, in turn.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import tempfile
from collections.abc import Iterator
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
    read_results,
    update_section,
)
from benchmarks._layouts_hand import BATCH, MICROBATCHES, SCRIPTS, WORLD, model
from benchmarks.overhead import Gate, _GatedLoader, _receive, gated

NAME, TITLE = "layouts", "Layouts: samples/s"
PARALLEL = {
    "dp": "dp=2",
    "fsdp": "fsdp=2",
    "zero1": "dp=2,zero1",
    "tp": "tp=2",
    "pp": f"pp=2,schedule=1f1b,microbatches={MICROBATCHES}",
}
SAME_SAMPLES = ("one process", "tp", "pp")  # each rank reads the whole batch
ABOUT = (
    f"ViT of 0.8 M parameters on 32x32, global batch {BATCH}, samples in memory, one thread a process; the script, "
    "Echelon and one process alive at once, windows granted in turn; medians of windows, ratios are medians of paired "
    "windows. pp: 1F1B, cut in the middle by both."
)


def tensors() -> Any:
    """Return (inputs, targets): random images and labels, the same in every contender."""
    import torch

    generator = torch.Generator().manual_seed(0)
    return torch.randn(2048, 3, 32, 32, generator=generator), torch.randint(10, (2048,), generator=generator)


def by_hand(layout: str, rank: int, gate: Gate) -> None:
    """Run the script of a layout."""
    import torch.distributed as dist
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    data = TensorDataset(*tensors())
    if layout != "one process":
        dist.init_process_group("gloo")
    whole = layout in SAME_SAMPLES
    sampler: DistributedSampler[Any] = DistributedSampler(data, 1 if whole else WORLD, 0 if whole else rank)
    loader = DataLoader(data, BATCH // (1 if whole else WORLD), sampler=sampler, drop_last=True)
    SCRIPTS[layout](gated(lambda: iter(loader), gate))


def echelon(layout: str, rank: int, gate: Gate) -> None:
    """Run our loop with everything it does: phases, record, curves, progress."""
    from torch.utils.data import TensorDataset

    from echelon.config import build
    from echelon.data import from_datasets
    from echelon.observe.record import Recorder
    from echelon.train import folder as folders
    from echelon.train.assemble import Given, assemble
    from echelon.train.loop import fit
    from echelon.train.stop import StopFlag
    from echelon.train.world import join_world

    path = Path(os.environ["BENCH_FOLDER"])
    settings: dict[str, Any] = {"data.batch_size": BATCH, "training.epochs": 1000, "optimizer.lr": 0.01}
    settings |= {"checkpoint.every": "1000000", "optimizer.name": "momentum", "optimizer.weight_decay": 0.0}
    settings |= {"data.loaders": 0, "strategy.parallel": PARALLEL[layout]}
    settings |= {"strategy.cuts": "blocks.2"} if layout == "pp" else {}
    config = build(None, settings).config
    folders.prepare(path, config)
    data = TensorDataset(*tensors())
    given = Given(model(), from_datasets(data, TensorDataset(*(t[:64] for t in data.tensors))))
    with join_world(config) as world:
        run, cursor = assemble(config, path, world, Recorder(path if rank == 0 else None), given)
        run.train_loader = _GatedLoader(run.train_loader, gate)  # type: ignore[assignment]
        try:
            fit(run, cursor, StopFlag())
        except EOFError:
            return


def _rank(what: tuple[str, str], rank: int, port: int, pipe: Connection, setup: tuple[int, str]) -> None:
    import torch

    torch.set_num_threads(1)
    kind, layout = what
    world = 1 if layout == "one process" else WORLD
    settings: dict[str, Any] = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": world,
        "LOCAL_WORLD_SIZE": world,
        "GROUP_RANK": 0,
    }
    settings |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": kind}
    os.environ.update({key: str(value) for key, value in settings.items()}, BENCH_FOLDER=setup[1])
    (echelon if kind == "echelon" else by_hand)(layout, rank, Gate(pipe, setup[0]))
    pipe.send(None)


def measure(layout: str, windows: int, steps: int) -> dict[str, list[tuple[float, float]]]:
    """Return (seconds, CPU seconds of all ranks) of each window, by contender; the first window is warm-up."""
    contenders = {"one process": ("hand", "one process"), "hand": ("hand", layout), "echelon": ("echelon", layout)}
    pipes: dict[str, list[Connection]] = {}
    processes: list[Any] = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            for name, what in contenders.items():
                pipes[name] = list(_start(what, (steps, f"{folder}/{name}"), processes))
            results: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
            for window in range(windows + 1):
                for name in contenders if window % 2 else [*contenders][::-1]:
                    for pipe in pipes[name]:
                        pipe.send(True)
                    costs = [_receive(pipe, name) for pipe in pipes[name]]
                    if window:
                        results[name].append((max(c[0] for c in costs), sum(c[1] for c in costs)))
            return results
    finally:
        for process in processes:
            process.kill()
            process.join(10)


def _start(what: tuple[str, str], setup: tuple[int, str], processes: list[Any]) -> Iterator[Connection]:
    from torch.distributed import TCPStore

    context = mp.get_context("spawn")
    probe = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    port = probe.port
    del probe
    for rank in range(1 if what[1] == "one process" else WORLD):
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=_rank, args=(what, rank, port, theirs, setup), daemon=True))
        processes[-1].start()
        yield ours


def render() -> str:
    """Write the newest result of each layout as a table."""
    newest = {result["layout"]: result for result in read_results(NAME)}
    rows = []
    for layout in [each for each in PARALLEL if each in newest]:
        result = newest[layout]
        seconds = {name: [window[0] for window in each] for name, each in result["windows"].items()}
        rate = {name: median(BATCH * result["steps"] / s for s in each) for name, each in seconds.items()}
        cpu = paired_ratio(*([window[1] for window in result["windows"][name]] for name in ("echelon", "hand")))
        rows.append(
            (
                f"`{PARALLEL[layout]}`",
                f"{rate['one process']:.0f}",
                f"{rate['hand']:.0f}",
                f"{rate['echelon']:.0f}",
                f"{paired_ratio(seconds['hand'], seconds['echelon']):.3f}",
                f"{paired_ratio(seconds['one process'], seconds['echelon']):.2f}",
                f"{cpu:.3f}",
            )
        )
    header = ("layout", "one process", "hand-written", "Echelon", "Echelon / hand-written", "Echelon / one process")
    last = next(reversed(newest.values()))
    line = environment_line(last["command"], last["environment"])
    return f"{line}\n\n{ABOUT}\n\n{markdown_table((*header, 'CPU time, Echelon / hand-written'), rows)}"


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--only", nargs="+", default=list(PARALLEL), choices=list(PARALLEL))
    parser.add_argument("--print", action="store_true", help="leave RESULTS.md and the raw results as they are")
    parser.add_argument("--render", action="store_true", help="the table again, from the raw results")
    options = parser.parse_args()
    for layout in () if options.render else options.only:
        windows = measure(layout, options.windows, options.steps)
        ratio = paired_ratio([w[0] for w in windows["hand"]], [w[0] for w in windows["echelon"]])
        print(f"{layout}: Echelon / hand-written {ratio:.3f}", flush=True)
        if not options.print:
            result = {"layout": layout, "steps": options.steps, "windows": windows}
            append_result(NAME, {**result, "command": command_line("benchmarks.layouts")})
    if not options.print:
        update_section(TITLE, render())


if __name__ == "__main__":
    main()
