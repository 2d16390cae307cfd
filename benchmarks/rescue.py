"""Layouts that divide the model or the optimizer's state: what a killed worker costs, and what being ready for it does.

python -m benchmarks.rescue [--kills 5] [--rounds 6] [--link 1gbit] [--only stalls|cost]

Each layout trains digits with a small transformer. Stall: from SIGKILL of a random worker to the end of the next step
that all make together. Cost: steps with `--elastic on` over `off`, in runs that take turns, with the bytes that a step
sends besides, and the memory of the fullest rank: with copies, over loopback and over links of `--link`, which need
root; and with the flag alone.
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
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev

from benchmarks._common import command_line, environment_line, interleave, markdown_table, median, update_section
from benchmarks.elastic_cost import T_95
from echelon.records.events import Resumed
from echelon.records.file import read_records
from echelon.records.kinds import Start, Steps

LAYOUTS = {"fsdp=2": 2, "dp=2,zero1": 2, "dp=2,tp=2": 4, "dp=2,pp=2": 4, "dp=2,fsdp=2": 4, "fsdp=4": 4}
COPIES = ("fsdp=2", "dp=2,zero1")
MODEL, BATCH, STEPS, WARM = "small_vit", 128, 150, 20
DEADLINE_S = 60.0


def command(layout: str, run: Path, *settings: str) -> list[str]:
    """Return what trains in a layout."""
    arguments = [sys.executable, "-m", "echelon", "train", "digits", "--model", MODEL, "--batch-size", str(BATCH)]
    arguments += ["--workers", str(LAYOUTS[layout]), "--parallel", layout, "--device", "cpu", "--threads", "1"]
    return [*arguments, "--epochs", "100000", "--eval-every", "0", "--run", str(run), *settings]


def stalls_s(layout: str, kills: int, folder: Path) -> tuple[list[float], int]:
    """Kill random workers; returns seconds from each kill to the end of the next step, and the steps that were lost."""
    run, stalls, draws = folder / "run", list[float](), random.Random(0)
    settings = ("--elastic", "on", "--max-restarts", str(kills), "--max-steps", "100000")
    process = subprocess.Popen(command(layout, run, *settings), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for number in range(kills):
            _wait(lambda number=number: len(_starts(run)) > number and _steps_since(run, _starts(run)[-1].t))
            time.sleep(0.5 + draws.random())  # the random moment
            killed_t = time.time()
            os.kill(draws.choice(_starts(run)[-1].pids), signal.SIGKILL)
            _wait(lambda number=number: len(_starts(run)) > number + 1 and _steps_since(run, _starts(run)[-1].t))
            stalls.append(_steps_since(run, _starts(run)[-1].t)[0].t - killed_t)
    finally:
        process.terminate()
        process.wait(DEADLINE_S)
    return stalls, sum(event.lost_steps or 0 for event in read_records(run, Resumed))


def _starts(run: Path) -> list[Start]:
    return read_records(run, Start) if run.exists() else []


def _steps_since(run: Path, t: float) -> list[Steps]:
    return [steps for steps in read_records(run, Steps) if steps.t > t]


def _wait(ready: object) -> None:
    assert callable(ready)
    ends = time.monotonic() + DEADLINE_S
    while not ready():
        if time.monotonic() > ends:
            raise SystemExit(f"a run stood still for {DEADLINE_S:g} s")
        time.sleep(0.02)


def cost(layout: str, elastic: str, link: str, folder: Path) -> tuple[float, float, float]:
    """Return seconds and other bytes of a step, and bytes of memory of the fullest rank."""
    settings = ["--elastic", elastic, "--max-steps", str(STEPS), *(["--link", link] if link else [])]
    subprocess.run(command(layout, folder / "run", *settings), check=True, timeout=600, capture_output=True)
    windows = [steps for steps in read_records(folder / "run", Steps) if steps.step > WARM]
    count = sum(steps.count for steps in windows)
    seconds, others = sum(steps.seconds for steps in windows), sum(steps.other_wire_bytes for steps in windows)
    return seconds / count, others / count, max(max(steps.memory_bytes) for steps in windows)


def cost_row(layout: str, link: str, rounds: int) -> list[object]:
    """Measure what a layout's readiness costs."""
    found: dict[str, list[tuple[float, float, float]]] = {"on": [], "off": []}
    for _, elastic in interleave(["on", "off"], rounds):
        with tempfile.TemporaryDirectory() as folder:
            found[elastic].append(cost(layout, elastic, link, Path(folder)))
    ratios = [on[0] / off[0] for on, off in zip(found["on"], found["off"], strict=True)]
    half = T_95[len(ratios) - 1] * stdev(ratios) / len(ratios) ** 0.5
    more = median(on[1] for on in found["on"]) - median(off[1] for off in found["off"])
    memory = (median(on[2] for on in found["on"]) - median(off[2] for off in found["off"])) / 1e6
    step_ms = 1000 * median(off[0] for off in found["off"])
    ratio = f"{mean(ratios):.3f} ({mean(ratios) - half:.3f} to {mean(ratios) + half:.3f})"
    return [layout, link or "loopback", f"{step_ms:.1f}", ratio, f"{more / 1000:.1f}", f"{memory:+.1f}"]


def stall_row(layout: str, kills: int) -> list[object]:
    """Measure what killed workers cost in a layout."""
    with tempfile.TemporaryDirectory() as folder:
        stalls, lost = stalls_s(layout, kills, Path(folder))
    return [layout, len(stalls), f"{median(stalls):.2f}", f"{min(stalls):.2f} to {max(stalls):.2f}", lost]


def _written(title: str, text: str, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    table = markdown_table(header, rows)
    print(table, flush=True)
    update_section(title, f"{environment_line(command_line('benchmarks.rescue'))}\n\n{text}\n\n{table}\n")


def main() -> None:
    """Measure, print and write the sections."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--link", default="1gbit")
    parser.add_argument("--only", default="", choices=["stalls", "cost"])
    options = parser.parse_args()
    if options.only != "cost":
        _written(
            "Elastic: survivors save what split layouts have trained",
            "digits, `small_vit`, one machine. Seconds from SIGKILL of a random worker to the end of the next step of "
            "all ranks; the aim is below 5 s. Steps lost: trained before a kill, and trained again after it.",
            ["layout", "kills", "median s", "from, to", "steps lost"],
            [stall_row(layout, options.kills) for layout in LAYOUTS],
        )
    if options.only == "stalls":
        return
    links = [(layout, link) for layout in COPIES for link in ("", options.link)] + [("dp=2,tp=2", "")]
    _written(
        "Elastic: second copies",
        f"digits, `small_vit`, `--elastic on` over `off`: mean of {options.rounds} pairs of runs of {STEPS} steps that "
        "took turns, 95% interval. kB: what all ranks together send besides in a step. MB: of the fullest rank.",
        ["layout", "link", "ms a step, off", "on / off", "kB", "MB"],
        [cost_row(layout, link, options.rounds) for layout, link in links],
    )


if __name__ == "__main__":
    main()
