"""How long the survivors of a killed worker stand still, with `--elastic on`: digits, plain replicas of one machine.

python -m benchmarks.elastic [--workers 3] [--kills 12]
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks._common import command_line, environment_line, median, update_section
from echelon.records.file import read_records
from echelon.records.kinds import Start, Steps

DEADLINE_S = 100.0  # for all kills
ECHELON = [sys.executable, "-m", "echelon"]


def stalls_s(folder: Path, workers: int, kills: int) -> list[float]:
    """Kill workers other than the first, each when all are there; return seconds from a kill to the next steps."""
    command = [*ECHELON, "train", "digits", "--workers", str(workers), "--device", "cpu", "--threads", "1"]
    command += ["--epochs", "10000", "--eval-every", "0", "--elastic", "on", "--max-restarts", str(kills)]
    process = subprocess.Popen([*command, "--run", str(folder)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    stalls: list[float] = []
    draws, ends = random.Random(0), time.monotonic() + DEADLINE_S
    try:
        while len(stalls) < kills and time.monotonic() < ends and process.poll() is None:
            starts = read_records(folder, Start) if folder.exists() else []
            time.sleep(0.5 + draws.random())
            if not starts or starts[-1].world_size < workers or len(read_records(folder, Start)) > len(starts):
                continue
            killed_t = time.time()
            os.kill(starts[-1].pids[draws.randrange(1, workers)], signal.SIGKILL)
            if (stall := _next_start_s(folder, len(starts), killed_t)) is not None:
                stalls.append(stall)
        return stalls
    finally:
        process.terminate()
        process.wait(60)


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
    parser.add_argument("--kills", type=int, default=12)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        stalls = sorted(stalls_s(run, options.workers, options.kills))
        steps = [s for w in read_records(run, Steps) for s in range(w.step - w.count + 1, w.step + 1)]
    once = "each step is recorded once" if steps == list(range(1, len(steps) + 1)) else "steps are missing or doubled"
    text = (
        f"- SIGKILL of one of {options.workers} workers to the survivors' next step ({len(stalls)} kills): median "
        f"{median(stalls):.2f} s, from {stalls[0]:.2f} to {stalls[-1]:.2f} s; the aim is a median below 0.5 s. "
        f"{once.capitalize()}."
    )
    print(text)
    update_section(
        "Elastic: survivors of a killed worker", f"{environment_line(command_line('benchmarks.elastic'))}\n\n{text}\n"
    )


if __name__ == "__main__":
    main()
