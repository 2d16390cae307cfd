"""How long the survivors of a killed worker stand still, with `--elastic on`: digits, plain replicas.

python -m benchmarks.elastic [--workers 3] [--machines 1] [--kills 12] [--stop] [--parameters MB]

With `--machines 3` the workers are on so many machines: network namespaces on links of 1 Gbit/s, one worker on each.
With `--stop` workers are stopped (SIGSTOP) instead; what passes until they are ended, 2 s at least, is left out.
With `--parameters` the model has so many megabytes of them, and what is told too is for how long the others wait when
a worker joins again.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch import nn

from benchmarks._common import command_line, environment_line, median, update_section
from echelon.launch.link import ShapedNetwork, parse_link
from echelon.records.events import Event, WorkerDied
from echelon.records.file import read_records
from echelon.records.kinds import Start, Steps

DEADLINE_S = 100.0  # for all kills
LINK = "1gbit"
MEGABYTES = "ECHELON_BENCHMARK_MB"
_STOPPED = re.compile(r"stopped \(SIGSTOP\) for ([0-9.]+) s")
_AGREED = re.compile(r"agreed in ([0-9.]+) s")
ECHELON = [sys.executable, "-m", "echelon"]


@contextmanager
def training(folder: Path, workers: int, machines: int, kills: int, megabytes: int) -> Iterator[Path]:
    """Train on workers, or on one of each machine; gives the run's folder, with its record."""
    os.environ[MEGABYTES] = str(megabytes)
    common = ["--device", "cpu", "--threads", "1", "--epochs", "10000", "--eval-every", "0", "--elastic", "on"]
    common += ["--max-restarts", str(kills)]
    common += ["--model", "benchmarks.elastic:wide"] if megabytes else []
    if machines == 1:
        with _commands([["--workers", str(workers), *common, "--run", str(folder / "run")]], [[]]):
            yield folder / "run"
        return
    with ShapedNetwork(machines, parse_link(LINK)) as network:
        common += ["--workers", "1", "--nodes", str(machines), "--rendezvous", f"{network.addresses[0]}:29400"]
        arguments = [[*common, "--run", str(folder / f"machine{i}")] for i in range(machines)]
        with _commands(arguments, [network.command_prefix(i) for i in range(machines)]):
            yield folder / "machine0"


@contextmanager
def _commands(arguments: Sequence[Sequence[str]], prefixes: Sequence[Sequence[str]]) -> Iterator[None]:
    environment = {**os.environ, "ECHELON_RUN_SECRET": secrets.token_hex(32)}
    started = [
        subprocess.Popen(
            [*prefix, *ECHELON, "train", "digits", *rest], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env=environment,
        )
        for rest, prefix in zip(arguments, prefixes, strict=True)
    ]  # fmt: skip
    try:
        yield
    finally:
        for process in started:
            process.terminate()
        for process in started:
            process.wait(60)


def wide(classes: int = 10) -> nn.Module:
    """Return two layers with so many megabytes of parameters as the environment says."""
    width = int(os.environ[MEGABYTES]) * 250_000 // (64 + classes)
    return nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.ReLU(), nn.Linear(width, classes))


def joins(run: Path) -> list[tuple[float, int]]:
    """Return for how long the others waited for each worker that joined, and the bytes that it was sent."""
    sent = [start.recovery_bytes for start in read_records(run, Start)][1:]
    agreed = [_AGREED.search(event.message) for event in read_records(run, Event) if event.name == "members"]
    return [(float(m[1]), n) for m, n in zip(agreed, sent, strict=False) if m is not None and n]


def ended_after_s(run: Path) -> list[float]:
    """Return for how long each worker that was stopped had been so when it was ended: its deadline, and a look."""
    told = (_STOPPED.search(death.message) for death in read_records(run, WorkerDied))
    return [float(m[1]) for m in told if m is not None]


def stalls_s(run: Path, workers: int, kills: int, signum: int) -> list[float]:
    """Kill workers other than the first, each when all are there; return seconds from a signal to the next steps."""
    stalls: list[float] = []
    draws, ends = random.Random(0), time.monotonic() + DEADLINE_S
    while len(stalls) < kills and time.monotonic() < ends:
        starts = read_records(run, Start) if run.exists() else []
        time.sleep(0.5 + draws.random())
        if not starts or starts[-1].world_size < workers or len(read_records(run, Start)) > len(starts):
            continue
        killed_t = time.time()
        os.kill(starts[-1].pids[draws.randrange(1, workers)], signum)
        if (stall := _next_start_s(run, len(starts), killed_t)) is not None:
            stalls.append(stall)
    return stalls


def _next_start_s(folder: Path, before: int, killed_t: float) -> float | None:
    """Return seconds from a kill until the survivors have agreed, are connected, and begin a step."""
    while time.time() < killed_t + DEADLINE_S:
        starts = read_records(folder, Start)
        if len(starts) > before:
            return starts[before].t - killed_t
        time.sleep(0.02)
    return None


def main() -> None:
    """Measure, print and write the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--machines", type=int, default=1)
    parser.add_argument("--kills", type=int, default=12)
    parser.add_argument("--stop", action="store_true")
    parser.add_argument("--parameters", type=int, default=0, metavar="MB")
    options = parser.parse_args()
    workers = options.workers if options.machines == 1 else options.machines
    with tempfile.TemporaryDirectory() as folder:
        with training(Path(folder), workers, options.machines, options.kills, options.parameters) as run:
            signum = signal.SIGSTOP if options.stop else signal.SIGKILL
            stalls = stalls_s(run, workers, options.kills, signum)
            joined = joins(run)
        # Machines tell the first one of their deaths a moment later.
        ended_s = ended_after_s(run) if options.stop else [0.0] * len(stalls)
        stalls = sorted(s - ended for s, ended in zip(stalls, ended_s, strict=True))
        steps = [s for w in read_records(run, Steps) for s in range(w.step - w.count + 1, w.step + 1)]
    once = "each step is recorded once" if steps == list(range(1, len(steps) + 1)) else "steps are missing or doubled"
    where = "" if options.machines == 1 else f", each on a machine of its own (links of {LINK}),"
    less = f", without a deadline of {median(ended_s):.1f} s" if options.stop else ""
    text = (
        f"- {signum.name} of one of {workers} workers{where} to the survivors' next step ({len(stalls)} times){less}: "
        f"median {median(stalls):.2f} s, from {stalls[0]:.2f} to {stalls[-1]:.2f} s; the aim is a median below 0.5 s. "
        f"{once.capitalize()}."
    )
    if options.parameters and joined:
        waited, sent = median([s for s, _ in joined]), median([n for _, n in joined])
        text += (
            f" When a worker joined again, {sent / 1e6:.0f} MB were sent, for which the others waited {waited:.2f} s."
        )
    print(text)
    title = "Elastic: survivors of a " + ("stopped" if options.stop else "killed") + " worker"
    title += "" if options.machines == 1 else " on several machines"
    title = f"Elastic: a worker joins with {options.parameters} MB of parameters" if options.parameters else title
    update_section(title, f"{environment_line(command_line('benchmarks.elastic'))}\n\n{text}\n")


if __name__ == "__main__":
    main()
