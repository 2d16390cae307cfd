"""A straggler: 4 workers, one of which is slowed, under every way to agree; then accuracy at equal samples.

    python -m benchmarks.straggler [--seconds 20] [--slow 4] [--repeats 3]            # throughput
    python -m benchmarks.straggler accuracy --data data/cifar10 [--seeds 3] [--epochs 5]

A batch's computation is a sleep: `--step` seconds for 32 samples, times `--slow` on worker 0, which stands for its
device's time without using this machine's cores. Around it everything is real: processes, messages, server updates of
a small network. The yardstick is the sum of what the four workers do alone in the same time.

Accuracy: real training through `echelon train`, equal epochs (equal samples), plain async against async with delay
compensation; mean and spread over seeds.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

SAMPLES = 32
WORKERS = 4
WAYS = (
    "allreduce",
    "local(8)",
    "ps(mode=sync)",
    "ps(mode=sync, backup=1)",
    "ps(mode=ssp, staleness=3)",
    "ps(mode=async)",
)


def model() -> nn.Module:
    """A small network: its gradients are what travels."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


class Sleeper:
    """A worker's computation: sleeps, then makes gradients by a real backward pass of a few samples."""

    def __init__(self, rank: int, step_s: float, slow: float) -> None:
        self._seconds = step_s * (slow if rank == 0 else 1.0)
        self._inputs = torch.randn(4, 64, generator=torch.Generator().manual_seed(rank))

    def backward(self, module: nn.Module, share: float) -> None:
        """Compute for `share` of 32 samples."""
        time.sleep(self._seconds * share)
        module(self._inputs).square().mean().backward()


def _collective(rank: int, way: str, args: argparse.Namespace, folder: str, results: Any) -> None:
    """Train with allreduce or local averaging; reports samples."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORKERS)
    module = model()
    sleeper, period = Sleeper(rank, args.step, args.slow), 8 if way.startswith("local") else 1
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    dist.barrier()
    began, samples, step = time.perf_counter(), 0, 0
    while True:
        optimizer.zero_grad()
        sleeper.backward(module, 1.0)
        step += 1
        tensors = [p.data for p in module.parameters()] if period > 1 else [p.grad for p in module.parameters()]
        if step % period == 0:
            over = torch.tensor([float(time.perf_counter() - began > args.seconds)])
            flat = torch.cat([over, *(t.reshape(-1) for t in tensors if t is not None)])
            dist.all_reduce(flat)
            samples += SAMPLES * period
            if flat[0] > 0:
                break
        optimizer.step()
    results.put((rank, samples / (time.perf_counter() - began)))
    dist.destroy_process_group()


def _ps_worker(rank: int, way: str, args: argparse.Namespace, address: str, results: Any) -> None:
    from echelon.core.spec import bind, parse_spec
    from echelon.observe.phases import HostClock
    from echelon.sync.ps import ParameterServer, WorkerOptions, model_table
    from echelon.sync.server.client import Client, ClientConfig, PushInfo
    from echelon.sync.server.identity import derive_keys
    from echelon.sync.server.settings import Settings
    from echelon.sync.server.table import Cut

    torch.set_num_threads(1)
    settings, module = bind(parse_spec(way), Settings), model()
    client = Client(ClientConfig(f"worker{rank}", derive_keys(b"s" * 32), address, "none", 0, rank, 15.0,
                                 aggregates=settings.aggregates))  # fmt: skip
    table = model_table(module, Cut(1, settings.chunk_bytes))
    client.join({"fingerprint": table.fingerprint})
    client.set_table(table)
    strategy = ParameterServer(module, table, client, WorkerOptions(settings, 0.0, HostClock()))
    sleeper, samples, began, ended = Sleeper(rank, args.step, args.slow), 0, 0.0, 0.0
    while (task := client.next_task()) is not None:
        if task["kind"] == "setup":
            client.wait_for_servers(1)
            client.put(table, {k: {"value": v, "version": 0} for k, v in strategy.key_values().items()}, 30.0)
            client.result(task["task"], {"fingerprint": table.fingerprint, "steps_per_epoch": 10**6, "done_below": 0,
                                         "done_beyond": []})  # fmt: skip
            continue
        began = began or time.perf_counter()
        strategy.begin(PushInfo(task["task"], task["step"], task["share"], task["shares"], 0, 0, 0.01))
        strategy.begin_step(SAMPLES, SAMPLES * task["shares"])
        with strategy.micro_batch(True):
            sleeper.backward(module, 1.0)
        strategy.step()
        info = {"loss": 0.0, "correct": 0, "samples": SAMPLES, "lr": 0.01, "phases": [], "memory_bytes": 0,
                "sent_bytes": 0}  # fmt: skip
        client.finish_task(task["task"], info)
        ended = time.perf_counter()
        if ended - began > args.seconds:
            break
        samples += SAMPLES
    results.put((rank, (samples - SAMPLES * client.stats.late / len(table.keys)) / max(1e-9, ended - began)))
    time.sleep(2 * args.step * args.slow)  # the others finish before this one leaves
    client.close()


def _ps_roles(way: str, folder: str, address: Any) -> None:
    """Scheduler and server of one way, as threads of one process."""
    import threading

    from echelon.core.spec import bind, parse_spec
    from echelon.observe.record import Recorder
    from echelon.sync.server.identity import derive_keys
    from echelon.sync.server.scheduler import Callbacks, Plan, Scheduler, SchedulerConfig
    from echelon.sync.server.server import Server, ServerConfig
    from echelon.sync.server.settings import Settings

    torch.set_num_threads(1)
    settings, keys = bind(parse_spec(way), Settings), derive_keys(b"s" * 32)
    path = Path(folder)

    def nothing(*ignored: Any) -> None:
        pass

    plan = Plan(1, 0, 0, None, None)
    config = SchedulerConfig(settings, keys, f"ipc://{folder}/scheduler", path, plan, 60.0)
    scheduler = Scheduler(config, Recorder(path), Callbacks(nothing, nothing, nothing))
    threading.Thread(target=scheduler.run, daemon=True).start()
    where = f"ipc://{folder}/server0"
    server = Server(ServerConfig("server0", 0, settings, keys, scheduler.listener.address, where, "none", 0, path,
                                 lambda tensors, decay: torch.optim.SGD(tensors, lr=0.01)))  # fmt: skip
    address.send(scheduler.listener.address)
    server.run()


def throughput(way: str, args: argparse.Namespace) -> float:
    """Return samples/s of all workers together under one way to agree."""
    context = torch.multiprocessing.get_context("spawn")
    results = context.Queue()
    with tempfile.TemporaryDirectory(prefix="straggler-") as folder:
        roles, where = None, folder
        if way.startswith("ps"):
            here, there = context.Pipe(duplex=False)
            roles = context.Process(target=_ps_roles, args=(way, folder, there), daemon=True)
            roles.start()
            assert here.poll(120), "the server did not start"
            where = here.recv()
        target: Any = _ps_worker if roles else _collective
        workers = [context.Process(target=target, args=(r, way, args, where, results)) for r in range(WORKERS)]
        for worker in workers:
            worker.start()
        rates = [results.get(timeout=args.seconds + 60)[1] for _ in workers]
        for process in [*workers, *([roles] if roles else [])]:
            process.join(10 if process is not roles else 0)
            if process.is_alive():
                process.kill()
    return sum(rates)


def compare(args: argparse.Namespace) -> None:
    """Print samples/s of each way against the sum of what the workers can do alone; ways interleaved."""
    alone = sum(SAMPLES / (args.step * (args.slow if rank == 0 else 1.0)) for rank in range(WORKERS))
    seen: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(args.repeats):
        for way in WAYS:
            seen[way].append(throughput(way, args))
    print(f"sum of the workers alone: {alone:.0f} samples/s\n\n| sync | samples/s | of the sum |\n|---|---|---|")
    for way, rates in seen.items():
        print(f"| {way} | {statistics.median(rates):.0f} | {statistics.median(rates) / alone:.2f} |")


def accuracy(args: argparse.Namespace) -> None:
    """Print top-1 at equal samples: plain async against async with delay compensation, over seeds."""
    ways = ["allreduce", "ps(mode=async)", "ps(mode=async, compensation=constant)",
            "ps(mode=async, compensation=adaptive)"]  # fmt: skip
    seen: dict[str, list[float]] = {way: [] for way in ways}
    for seed in range(args.seeds):
        for way in ways:
            with tempfile.TemporaryDirectory(prefix="straggler-") as folder:
                command = [sys.executable, "-m", "echelon", "train", args.data, "--sync", way, "--threads", "1",
                           "--workers", str(WORKERS), "--epochs", str(args.epochs), "--seed", str(seed), "--run",
                           f"{folder}/run", *args.more]  # fmt: skip
                subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
                seen[way].append(json.loads(Path(f"{folder}/run/summary.json").read_text())["metrics"]["top1"])
                print(f"seed {seed}: {way} {seen[way][-1]:.4f}", flush=True)
    print("\n| sync | top-1, mean | spread (max - min) |\n|---|---|---|")
    for way, values in seen.items():
        print(f"| {way} | {statistics.mean(values):.4f} | {max(values) - min(values):.4f} |")


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["throughput", "accuracy"], default="throughput")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--step", type=float, default=0.1)
    parser.add_argument("--slow", type=float, default=4.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--data", default="data/cifar10")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("more", nargs=argparse.REMAINDER, help="options for echelon train")
    args = parser.parse_args()
    accuracy(args) if args.what == "accuracy" else compare(args)


if __name__ == "__main__":
    main()
