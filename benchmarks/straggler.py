"""A straggler: 4 workers, one of which is slowed, under every way to agree; then accuracy at equal samples.

    python -m benchmarks.straggler [--seconds 8] [--repeats 3] [--slow 4] [--step 0.1]      # samples/s
    python -m benchmarks.straggler accuracy [--seeds 3] [--seconds 300]                      # CIFAR-10

Samples/s: a batch's computation is a sleep, `--step` seconds for 32 samples, times `--slow` on worker 0, which stands
for its device's time without using this machine's cores. Around it everything is real: processes, messages, gradients
and updates of a small network. The yardstick is what the same four workers do alone, each for itself, measured in turn
with the others.

Accuracy: see `_straggler_accuracy`. Results are appended to `benchmarks/results`; `--summary` writes both tables.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from benchmarks import _common as common
from benchmarks import _straggler_accuracy as accuracy
from benchmarks._straggler_roles import DEADLINE_S, WORKERS, Job, Work, lease_worker, process, queue, ready, roles
from echelon.coordinator.messages import TrainTask

TITLE = "A straggler: 4 workers, one 4x slower"
SAMPLES = 32
ALONE = "each alone"
WAYS = (
    ALONE,
    "allreduce",
    "local(8)",
    "ps(mode=sync)",
    "ps(mode=sync, backup=1)",
    "ps(mode=ssp, staleness=3)",
    "ps(mode=async)",
)


@dataclass(frozen=True)
class Pace:
    """How long to measure, seconds of a batch, how much slower worker 0 is."""

    seconds: float
    step_s: float
    slow: float

    def of(self, rank: int) -> float:
        """Seconds that a worker computes on a batch."""
        return self.step_s * (self.slow if rank == 0 else 1.0)


def model() -> nn.Module:
    """A small network: its gradients are what travels."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))


def _compute(module: nn.Module, seconds: float) -> int:
    """Sleep for the batch's time, with a real backward pass of a few samples in it."""
    ends = time.perf_counter() + seconds
    module(torch.ones(4, 64)).square().mean().backward()
    time.sleep(max(0.0, ends - time.perf_counter()))
    return SAMPLES


def _peer(rank: int, way: str, pace: Pace, folder: str, results: Any) -> None:
    """Train alone, with allreduce or with local averaging; reports samples/s."""
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORKERS)
    module, period = model(), {ALONE: 0, "allreduce": 1}.get(way, 8)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    dist.barrier()
    began, samples, over = time.perf_counter(), 0, False
    while not over:
        optimizer.zero_grad()
        samples += _compute(module, pace.of(rank))
        late = time.perf_counter() - began > pace.seconds
        if period == 0:
            over = late
        elif samples // SAMPLES % period == 0:
            parameters = list(module.parameters())
            tensors = [p.data if period > 1 else p.grad for p in parameters]
            flat = torch.cat([torch.tensor([float(late)]), *(t.reshape(-1) for t in tensors if t is not None)])
            dist.all_reduce(flat)
            over = bool(flat[0] > 0)
        optimizer.step()
    results.put((rank, samples / (time.perf_counter() - began)))
    dist.destroy_process_group()


def _leaser(rank: int, job: Job, pace: Pace, address: str, results: Any) -> None:
    """Train on leases; reports samples/s that were counted."""
    began: list[float] = []

    def compute(module: nn.Module, task: TrainTask) -> int:
        began.append(time.perf_counter())
        return _compute(module, pace.of(rank))

    seen = [0, 0, 0.0]

    def over(done: int, late: int) -> bool:
        seen[:] = [done, late, time.perf_counter()]
        return time.perf_counter() - began[0] > pace.seconds

    client = lease_worker(rank, job, address, Work(model, compute, lambda task: SAMPLES, over))
    results.put((rank, SAMPLES * (seen[0] - seen[1]) / (seen[2] - began[0])))
    time.sleep(2 * pace.of(0))  # the others finish before this one leaves
    client.close()


def rate(way: str, pace: Pace) -> float:
    """Return samples/s of all workers together under one way to agree."""
    results = queue()
    if not way.startswith("ps"):
        with tempfile.TemporaryDirectory(prefix="straggler-") as folder:
            own = [process(_peer, rank, way, pace, folder, results) for rank in range(WORKERS)]
            return _sum(own, results, pace)
    job = Job(way, 0.01, 1, 10**6)
    with roles(job) as run:
        own = [process(_leaser, rank, job, pace, run.address, results) for rank in range(WORKERS)]
        return _sum(own, results, pace)


def _sum(own: list[Any], results: Any, pace: Pace) -> float:
    total = sum(float(results.get(timeout=pace.seconds + DEADLINE_S)[1]) for _ in own)
    for each in own:
        each.join(10)
        each.kill()
    return total


def measure(args: argparse.Namespace) -> None:
    """Measure samples/s, ways in turn."""
    pace = Pace(args.seconds, args.step, args.slow)
    for turn, way in common.interleave(WAYS, args.repeats):
        found = rate(way, pace)
        common.append_result("straggler", {"way": way, "turn": turn, "samples_per_s": found, "started": args.started})
        print(f"{turn} {way}: {found:.0f} samples/s", flush=True)


def rate_table() -> str:
    """Write the last measurement's medians."""
    found = common.read_results("straggler")
    last = [r for r in found if r["started"] == found[-1]["started"]] if found else []
    seen = {way: [r["samples_per_s"] for r in sorted(last, key=lambda r: r["turn"]) if r["way"] == way] for way in WAYS}
    rows = [(way, f"{common.median(rates):.0f}", f"{common.paired_ratio(rates, seen[ALONE]):.2f}",
             f"{min(a / b for a, b in zip(rates, seen[ALONE], strict=False)):.2f}")
            for way, rates in seen.items() if rates]  # fmt: skip
    return common.markdown_table(["sync", "samples/s", "of the workers alone", "lowest round"], rows)


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=["rate", "accuracy"], default="rate")
    parser.add_argument("--seconds", type=float, default=8.0, help="of a measurement; accuracy: begin no run after it")
    parser.add_argument("--step", type=float, default=0.1)
    parser.add_argument("--slow", type=float, default=4.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--summary", action="store_true", help="write both tables from the results that there are")
    args = parser.parse_args()
    args.started = time.time()
    if args.summary:
        said = (
            f"{common.environment_line('python -m benchmarks.straggler [accuracy]')}\n\n"
            f"Samples/s: a batch of 32 takes 0.1 s (a sleep), 0.4 s on worker 0; the yardstick is the same workers "
            f"without communication. A batch that a backup made superfluous does not count.\n\n"
            f"{rate_table()}\n\n{accuracy.words()}\n\n{accuracy.table()}"
        )
        common.update_section(TITLE, said)
        print(said)
        return 0
    ready()
    if args.what == "accuracy":
        accuracy.measure(args.seeds, args.seconds)
    else:
        measure(args)
    return 0


if __name__ == "__main__":
    sys.exit(main())
