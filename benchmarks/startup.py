"""What of `echelon train digits --epochs 1` is not training, and how long a run stands still after a kill -9.

python -m benchmarks.startup [--runs 5]
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


def main() -> None:
    """Measure, print and write the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
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
