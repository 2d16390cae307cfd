"""Pushes and pulls of a parameter server in either order: whole runs over shaped links, in turns.

    python -m benchmarks.ps_order --link 1gbit --steps 20 --turns 3
    python -m benchmarks.ps_order --render

Two workers and a server, each in a network namespace behind a shaped link of its own (root).
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks._common import (
    REPOSITORY,
    append_result,
    command_line,
    environment_line,
    interleave,
    markdown_table,
    median,
    paired_ratio,
    read_results,
    update_section,
)
from benchmarks.priority import interval
from echelon.observe.phases import Phase
from echelon.reporting.report.records import load_run
from echelon.reporting.report.timing import measure

NAME, TITLE = "ps_order", "Parameter server: pushes and pulls in the order of the forward pass"
ORDERS = ("ready", "priority")
ABOUT = """The layers of `benchmarks.priority` on a device (10.9 M parameters, 43.6 MB of gradients; 0.13 s forwards and
0.28 s backwards for a batch, in which the processor is free) in whole runs of `echelon train digits --workers 2 --sync
"ps(mode=sync, order=...)"` with one server, SGD with momentum, no codec. The server's link carries both workers'
gradients and values. Runs take turns; seconds per step are medians of the runs' means after the first window; the ratio
is that of neighbouring runs, ready / priority, its median and 90% interval (bootstrap). Waits are for tasks and
values, of the workers' mean."""


def run_once(folder: Path, link: str, order: str, mode: str, steps: int) -> dict[str, float]:
    """Train, and return seconds per step and by phase."""
    command = [
        sys.executable, "-m", "echelon", "train", "digits", "--model", "benchmarks._ps_order_model:on_device",
        "--workers", "2", "--sync", f"ps(mode={mode}, order={order})", "--link", link, "--batch-size", "32",
        "--max-steps", str(steps), "--eval-every", "0", "--run", str(folder), "--optimizer", "sgd",
        "--momentum", "0.9", "--lr", "0.001",
    ]  # fmt: skip
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    subprocess.run(command, check=True, env=env, cwd=folder.parent, stdout=subprocess.DEVNULL, timeout=280)
    timing = measure(load_run(folder))
    assert timing is not None
    return {"step": timing.step_s, **timing.phases}


def render() -> str:
    """Write all turns of each link and mode as one row."""
    turns: dict[tuple[str, str], dict[str, list[dict[str, float]]]] = {}
    results = read_results(NAME)
    for result in results:
        of_key = turns.setdefault((result["link"], result["mode"]), {order: [] for order in ORDERS})
        for order in ORDERS:
            of_key[order] += result["turns"][order]
    rows = []
    for (link, mode), orders in sorted(turns.items()):
        ready, priority = ([turn["step"] for turn in orders[order]] for order in ORDERS)
        low, high = interval(ready, priority)
        waits = [f"{median(turn[Phase.COMMUNICATE] for turn in orders[order]):.3f}" for order in ORDERS]
        ratio = f"{paired_ratio(ready, priority):.2f} ({low:.2f} to {high:.2f})"
        rows.append([link, mode, len(ready), f"{median(ready):.3f}", f"{median(priority):.3f}", ratio, *waits])
    header = ["link", "mode", "runs of each", "ready, s/step", "priority, s/step", "ready / priority",
              "ready: waits, s", "priority: waits, s"]  # fmt: skip
    last = results[-1]
    return "\n\n".join([ABOUT, environment_line(last["command"], last["environment"]), markdown_table(header, rows)])


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", default="1gbit")
    parser.add_argument("--mode", default="sync")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--turns", type=int, default=3, help="runs of each order")
    parser.add_argument("--render", action="store_true", help="only write the table again")
    args = parser.parse_args()
    if not args.render:
        turns: dict[str, list[dict[str, Any]]] = {order: [] for order in ORDERS}
        with tempfile.TemporaryDirectory() as folder:
            for turn, order in interleave(ORDERS, args.turns):
                turns[order].append(run_once(Path(folder) / f"{order}{turn}", args.link, order, args.mode, args.steps))
                print(order, turns[order][-1], flush=True)
        command = command_line("benchmarks.ps_order")
        append_result(NAME, {"link": args.link, "mode": args.mode, "turns": turns, "command": command})
    update_section(TITLE, render())


if __name__ == "__main__":
    main()
