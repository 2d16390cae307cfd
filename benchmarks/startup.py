"""What of `echelon train digits --epochs 1` is not training, what a start costs, how long a kill -9 stops a run.

python -m benchmarks.startup [--runs 5] [--cost]
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from benchmarks._common import command_line, environment_line, median, update_section
from echelon.records.file import read_records
from echelon.records.kinds import Start, Steps

DEADLINE_S = 300.0
ECHELON = [sys.executable, "-m", "echelon"]


def start_and_end_s(folder: Path) -> tuple[float, float]:
    """Return (seconds of a run of one epoch that are not its steps, seconds of its steps)."""
    began = time.perf_counter()
    command = [*ECHELON, "train", "digits", "--epochs", "1", "--workers", "2", "--run", str(folder)]
    subprocess.run(command, check=True, capture_output=True, timeout=DEADLINE_S)
    whole = time.perf_counter() - began
    steps = sum(window.seconds for window in read_records(folder, Steps))
    return whole - steps, steps


def cost_of_start(folder: Path, workers: int) -> tuple[float, float]:
    """Return (processor seconds from the command to its first recorded step, MB of PSS then), of all its processes."""
    command = [*ECHELON, "train", "digits", "--epochs", "400", "--workers", str(workers), "--run", str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        _await(folder, process, lambda window: True)
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        return sum(sum(p.cpu_times()[:4]) for p in family), sum(p.memory_full_info().pss for p in family) / 1e6
    finally:
        process.terminate()
        process.wait(60)


def cost_of_torch() -> tuple[float, float]:
    """Return (processor seconds, MB of PSS) of a process that imports torch alone."""
    code = "import torch, psutil; p = psutil.Process(); print(sum(p.cpu_times()[:2]), p.memory_full_info().pss / 1e6)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=DEADLINE_S)
    seconds, megabytes = map(float, done.stdout.split())
    return seconds, megabytes


def restart_s(folder: Path) -> float:
    """Kill a rank with SIGKILL in a run's middle; return seconds until the next step is recorded."""
    command = [*ECHELON, "train", "digits", "--epochs", "400", "--workers", "2", "--run", str(folder)]
    process = subprocess.Popen([*command, "--checkpoint-every", "100"], stdout=subprocess.DEVNULL)
    try:
        _await(folder, process, lambda window: window.step > 120)
        pid = read_records(folder, Start)[0].pids[1]
        os.kill(pid, signal.SIGKILL)
        killed = time.time()
        after = _await(folder, process, lambda window: _attempt(folder) > 0 and window.t > killed)
        return after.t - killed
    finally:
        process.terminate()
        process.wait(60)


def _attempt(folder: Path) -> int:
    return len(read_records(folder, Start)) - 1


def _await(folder: Path, process: subprocess.Popen[bytes], wanted: Callable[[Steps], bool]) -> Steps:
    end = time.monotonic() + DEADLINE_S
    while time.monotonic() < end and process.poll() is None:
        for window in reversed(read_records(folder, Steps)):
            if wanted(window):
                return window
        time.sleep(0.05)
    raise TimeoutError(f"the run in {folder} did not get there")


def print_costs(runs: int) -> None:
    """Print what a start costs beside `import torch`, in turns."""
    with tempfile.TemporaryDirectory() as folder:
        turns = [
            [cost_of_torch(), *(cost_of_start(Path(folder) / f"{turn}-{n}", n) for n in (1, 2, 4))]
            for turn in range(runs)
        ]
    names = ("import torch", "1 worker", "2 workers", "4 workers")
    for name, of_turns in zip(names, zip(*turns, strict=True), strict=True):
        seconds, megabytes = median(s for s, _ in of_turns), median(m for _, m in of_turns)
        print(f"{name}: {seconds:.1f} processor seconds, {megabytes:.0f} MB")


def main() -> None:
    """Measure, print and write the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--cost", action="store_true", help="only what a start costs, of 1, 2 and 4 workers; printed")
    options = parser.parse_args()
    if options.cost:
        print_costs(options.runs)
        return
    with tempfile.TemporaryDirectory() as folder:
        starts = [start_and_end_s(Path(folder) / f"start{i}") for i in range(options.runs + 1)][1:]
        restarts = [restart_s(Path(folder) / f"kill{i}") for i in range(options.runs)]
    overhead, training = median(s[0] for s in starts), median(s[1] for s in starts)
    text = (
        f"Medians of {options.runs} runs, the first left out.\n\n"
        f"- `echelon train digits --epochs 1 --workers 2`: {overhead:.1f} s are not training "
        f"(best {min(s[0] for s in starts):.1f}), {training:.2f} s are steps.\n"
        f"- kill -9 of a rank to the next recorded step: {median(restarts):.1f} s (best {min(restarts):.1f})."
    )
    print(text, json.dumps({"starts": starts, "restarts": restarts}))
    update_section("Start and restart", f"{environment_line(command_line('benchmarks.startup'))}\n\n{text}")


if __name__ == "__main__":
    main()
