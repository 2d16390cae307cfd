"""A link that changes while `echelon train` runs: 1 Gbit/s, 10 Mbit/s, 1 Gbit/s; adaptive beside fixed codecs.

python -m benchmarks.link_change [--data images speech-digits banking77] [--seeds 0] [--ways none int8 ...]
python -m benchmarks.link_change --render      # the table of all results so far, into RESULTS.md

Two workers of one thread each, on a machine of its own each (network namespaces, which need root). The link changes
after a third of the steps, and back after two thirds. Of each phase the seconds of a step count from `SETTLE` steps
after the change (what is under way then belongs to neither), as the run's record has them.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

from benchmarks._common import (
    REPOSITORY,
    append_result,
    command_line,
    environment_line,
    markdown_table,
    read_results,
    update_section,
)
from benchmarks.accuracy import interval
from benchmarks.slow_runs import WORKS, prepare
from echelon.launch.link import ShapedNetwork, parse_link
from echelon.records.file import read_records
from echelon.records.kinds import Start, Steps

NAME, TITLE = "link_change", "A link that changes during a run"
PHASES = ("1gbit", "10mbit", "1gbit")
WAYS = ("none", "int8", "topk(0.01)", "adaptive")
DATA = ("images", "speech-digits", "banking77")
EPOCHS = {"images": 4, "speech-digits": 12, "banking77": 4}
ABOUT = (
    "Two machines of one worker each; the link is changed after a third of the steps and back after two thirds. In "
    "brackets: how many times the seconds of the best fixed codec of that phase."
)
SETTLE = 4
DEADLINE_S = 1200.0


def train(data: Path, name: str, way: str, seed: int, folder: Path) -> dict[str, Any]:
    """Train once over the changing link; return the seconds of a step by phase, the steps, and the test's metric."""
    run = folder / "run"
    with ShapedNetwork(2, parse_link(PHASES[0])) as network, _machines(network, data, name, way, seed, run) as machines:
        steps = _follow(network, machines, run, name)
    windows = list(read_records(run, Steps))
    top1 = json.loads((run / "summary.json").read_text())["metrics"]["top1"]
    bounds = [0, *(round(steps * k / len(PHASES)) for k in range(1, len(PHASES) + 1))]
    phases = [_step_s(windows, first + SETTLE, last) for first, last in pairwise(bounds)]
    return {"phases": phases, "steps": steps, "top1": 100 * top1}


@contextmanager
def _machines(
    network: ShapedNetwork, data: Path, name: str, way: str, seed: int, run: Path
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start the same command on both machines; those that live on are ended."""
    command = [
        sys.executable, "-m", "echelon", "train", str(data), *WORKS[name].options, "--epochs", str(EPOCHS[name]),
        "--batch-size", "128", "--workers", "1", "--nodes", "2", "--rendezvous", f"{network.addresses[0]}:29400",
        "--threads", "1", "--device", "cpu", "--seed", str(seed), "--eval-every", "0", "--checkpoint-every", "1h",
        "--compression", way, "--run", str(run),
    ]  # fmt: skip
    path = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])}
    started = [
        subprocess.Popen([*network.command_prefix(i), *command], stdout=subprocess.DEVNULL, env=path) for i in range(2)
    ]
    try:
        yield started
    finally:
        for process in started:
            with suppress(ProcessLookupError):
                process.kill()
            process.wait()


def _follow(network: ShapedNetwork, machines: Sequence[subprocess.Popen[bytes]], run: Path, name: str) -> int:
    """Change the link at each third of the steps, and wait for the end; returns how many steps there were.

    Raises:
        CalledProcessError: the run failed.
        TimeoutError: it did not end in time.
    """
    ends, changes, total = time.monotonic() + DEADLINE_S, list(PHASES[1:]), 0
    while any(machine.poll() is None for machine in machines):
        if time.monotonic() > ends:
            raise TimeoutError(f"{name} did not end within {DEADLINE_S:.0f} s")
        last = max((w.step for w in read_records(run, Steps)), default=0) if (run / "record.jsonl").exists() else 0
        total = total or _steps_of(run)
        done = len(PHASES) - len(changes)
        if changes and total and last >= round(total * done / len(PHASES)):
            network.reshape(parse_link(changes.pop(0)))
        time.sleep(0.05)
    for machine in machines:
        if machine.returncode:
            raise subprocess.CalledProcessError(machine.returncode, machine.args)
    return max(w.step for w in read_records(run, Steps))


def _steps_of(run: Path) -> int:
    """Return how many steps the run will have, once it says so; else 0."""
    starts = list(read_records(run, Start)) if (run / "record.jsonl").exists() else []
    return starts[-1].steps_per_epoch * starts[-1].epochs if starts else 0


def _step_s(windows: Sequence[Steps], first: int, last: int) -> float:
    """Return the mean seconds of a step, of the windows that lie between two numbers of steps."""
    inside = [w for w in windows if first <= w.step - len(w.losses) and w.step <= last]
    return sum(w.seconds for w in inside) / sum(len(w.losses) for w in inside)


def measure(options: argparse.Namespace, name: str, folder: Path) -> None:
    """Do the runs of one data set, and append their results."""
    data = prepare(name, folder)
    for seed in options.seeds:
        for way in options.ways if seed % 2 == 0 else reversed(options.ways):
            found = train(data, name, way, seed, folder)
            shutil.rmtree(folder / "run")
            about = {"data": name, "way": way, "seed": seed}
            append_result(NAME, {**about, **found, "command": command_line("benchmarks.link_change")})
            print(about, [f"{1000 * s:.1f} ms" for s in found["phases"]], f"{found['top1']:.2f}%", flush=True)


def render() -> None:
    """Write the table of the newest result of each run."""
    results = [*{tuple(r[k] for k in ("data", "way", "seed")): r for r in read_results(NAME)}.values()]
    if not results:
        raise SystemExit("nothing was measured")
    rows = []
    for name in dict.fromkeys(r["data"] for r in results):
        own = [r for r in results if r["data"] == name]
        fixed = [way for way in dict.fromkeys(r["way"] for r in own) if not way.startswith("adaptive")]
        best = [min(_phase(own, way, k) for way in fixed) for k in range(len(PHASES))]
        for way in dict.fromkeys(r["way"] for r in own):
            rows.append(_row(name, way, own, best))
    phases = [f"{link}: ms a step (x the best fixed)" for link in PHASES]
    table = markdown_table(["data", "steps", "way", *phases, "top-1", "difference to none, points (90%)"], rows)
    where = environment_line(results[-1]["command"], results[-1]["environment"])
    update_section(TITLE, f"{where}\n\n{ABOUT}\n\n{table}")


def _phase(own: Sequence[dict[str, Any]], way: str, phase: int) -> float:
    return statistics.median(r["phases"][phase] for r in own if r["way"] == way)


def _row(name: str, way: str, own: Sequence[dict[str, Any]], best: Sequence[float]) -> list[str]:
    cells = [f"{1000 * _phase(own, way, k):.1f} ({_phase(own, way, k) / best[k]:.2f})" for k in range(len(PHASES))]
    by_seed = {r["seed"]: r for r in own if r["way"] == way}
    plain = {r["seed"]: r["top1"] for r in own if r["way"] == "none"}
    apart = [by_seed[seed]["top1"] - plain[seed] for seed in by_seed if seed in plain]
    told = f"{apart[0]:+.2f}, 1 seed" if len(apart) == 1 else "{:+.2f} ({:+.2f} to {:+.2f})".format(*interval(apart))
    top1 = statistics.mean(r["top1"] for r in by_seed.values())
    return [name, str(own[0]["steps"]), f"`{way}`", *cells, f"{top1:.2f}", "" if way == "none" else told]


def main() -> None:
    """Measure, or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", choices=DATA, default=list(DATA))
    parser.add_argument("--ways", nargs="+", default=list(WAYS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[0])
    parser.add_argument("--render", action="store_true", help="only write the table")
    options = parser.parse_args()
    if options.render:
        render()
        return
    for name in options.data:
        with tempfile.TemporaryDirectory() as folder:
            measure(options, name, Path(folder))
    render()


if __name__ == "__main__":
    main()
