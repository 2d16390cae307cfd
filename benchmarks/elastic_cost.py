"""What it costs without a death that survivors of one could go on: processor time of a step, `--elastic on` over `off`.

The difference of two runs is small beside what differs between any two: what a step does for it is timed alone, too.

python -m benchmarks.elastic_cost [--rounds 16] [--steps 600]
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import mean, stdev
from timeit import repeat
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from benchmarks._common import command_line, environment_line, update_section
from echelon.core.task import Stagnation
from echelon.core.terms import TermFolder
from echelon.trainer.commit import KeptDraws, Noted
from echelon.trainer.membership import Membership
from echelon.trainer.state import Cursor

WARM = 50  # steps that are not counted
NOTES = "ECHELON_COST_NOTES"
WAYS = {
    "off": ("--elastic", "off"),
    "on, equal parts": ("--elastic", "on", "--balance", "off"),
    "on": ("--elastic", "on"),
}
MODELS = {"small_cnn": ("no buffers", 0), "timm/test_efficientnet": ("BatchNorm", 20)}  # how many of it, about
T_95 = {
    2: 4.30,
    3: 3.18,
    5: 2.57,
    7: 2.36,
    11: 2.20,
    15: 2.13,
    19: 2.09,
    23: 2.07,
    31: 2.04,
}  # Student's, two-sided, by degrees of freedom


class TimedSGD(torch.optim.SGD):
    """SGD that notes the processor time of its process for a step, now and then; one that is only tried has others."""

    taken, begun_s = 0, 0.0

    def step(self, closure: Any = None) -> Any:
        """Update, and note."""
        result = super().step(closure)
        self.taken += 1
        if self.taken == WARM:
            self.begun_s = time.process_time()
        elif self.taken > WARM and self.taken % WARM == 0 and (folder := os.environ.get(NOTES)):
            used_s = (time.process_time() - self.begun_s) / (self.taken - WARM)
            Path(folder, f"{os.getpid()}-{id(self)}").write_text(f"{self.taken} {used_s}")
        return result


def cpu_s(model: str, steps: int, turn: int) -> dict[str, float]:
    """Train digits with two workers in each way, all at once, so that what disturbs one disturbs all.

    Returns:
        The processor seconds of a step, of both workers together, by way.
    """
    ways = list(WAYS)
    ways = ways[turn % len(ways) :] + ways[: turn % len(ways)]
    with tempfile.TemporaryDirectory() as root, ExitStack() as stack:
        started = [
            (way, stack.enter_context(_started(way, model, steps, Path(root) / str(i)))) for i, way in enumerate(ways)
        ]
        for way, process in started:
            if process.wait(timeout=900):
                raise SystemExit(f"{model}, {way}: exit code {process.returncode}")
        return {way: _noted(Path(root) / str(i), steps) for i, way in enumerate(ways)}


@contextmanager
def _started(way: str, model: str, steps: int, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Give a run's command, which is ended with the block."""
    notes = folder / "notes"
    notes.mkdir(parents=True)
    command = [sys.executable, "-m", "echelon", "train", "digits", "--model", model, "--workers", "2", "--threads", "1"]
    command += ["--device", "cpu", "--max-steps", str(steps), "--epochs", "10000", "--eval-every", "0"]
    command += ["--batch-size", "64", "--optimizer", "benchmarks.elastic_cost:TimedSGD", "--run", str(folder / "run")]
    environment = {**os.environ, NOTES: str(notes)}
    process = subprocess.Popen([*command, *WAYS[way]], env=environment, stdout=subprocess.DEVNULL)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        process.wait(timeout=60)


def _noted(folder: Path, steps: int) -> float:
    told = [file.read_text().split() for file in (folder / "notes").iterdir()]
    counted = [float(used_s) for count, used_s in told if int(count) == steps]
    if len(counted) != 2:
        raise SystemExit(f"{folder}: {told}")
    return sum(counted)


def work_us(model: nn.Module) -> float:
    """Return the processor microseconds of what a member does for it in a step, besides the step; the least of 5."""
    sync = SimpleNamespace(steps_together=True)
    saver = SimpleNamespace(best=None, stagnation=Stagnation(), owes_evaluation=False)
    run: Any = SimpleNamespace(parts=SimpleNamespace(local_model=model, sync=sync), saver=saver)
    copies, cursor = KeptDraws(model), Cursor(0, 0, 0)
    with tempfile.TemporaryDirectory() as folder:
        membership = Membership(TermFolder(Path(folder)), "rank0.0", 10.0)

        def one_step() -> None:
            Noted.of(run, cursor, "", between=True, copies=copies)
            assert not membership.has_news
            Noted.of(run, cursor, "", between=False)

        return 1e6 * min(repeat(one_step, number=1000, repeat=5, timer=time.process_time)) / 1000


def looks_us(seconds: float = 4.0) -> float:
    """Return the processor microseconds in a second of the thread that looks for a newer term, beside busy code."""
    with tempfile.TemporaryDirectory() as folder:
        membership = Membership(TermFolder(Path(folder)), "rank0.0", 10.0)
        before = set(threading.enumerate())
        with membership.connecting():
            pass
        (looks,) = set(threading.enumerate()) - before
        assert looks.ident is not None
        used = time.pthread_getcpuclockid(looks.ident)
        began, began_s = time.monotonic(), time.clock_gettime(used)
        while time.monotonic() < began + seconds:
            sum(range(1000))
        result = 1e6 * (time.clock_gettime(used) - began_s) / (time.monotonic() - began)
        membership.stop()
        return result


def main() -> None:
    """Measure, print and write the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--steps", type=int, default=600, help=f"a multiple of {WARM}")
    options = parser.parse_args()
    lines, looks = [], looks_us()
    for model, (kind, norms) in MODELS.items():
        found = [cpu_s(model, options.steps, turn) for turn in range(options.rounds)]
        off_ms = 1000 * mean(each["off"] for each in found)
        work = work_us(nn.Sequential(*[nn.BatchNorm2d(64) for _ in range(norms)]))
        ratios = ", ".join(
            f"{way}: {_interval([each[way] / each['off'] for each in found])}" for way in WAYS if way != "off"
        )
        lines.append(
            f"- `{model}` ({kind}), {off_ms:.1f} ms of processor time a step for two workers; over `off`: {ratios}; "
            f"its own work alone: {work:.0f} us a step and worker, and {looks:.0f} us a second to look who is there, "
            f"{200 * work / (1e6 * off_ms / 1000) + looks / 1e4:.2f}% of the processor time where a worker fills a core"
        )
        print(lines[-1], flush=True)
    update_section(
        "Elastic: what it costs without a death",
        f"{environment_line(command_line('benchmarks.elastic_cost'))}\n\n"
        f"Three runs at once, {options.rounds} times, so that what disturbs one disturbs all: means of their ratios, "
        "and a 95% interval; at most 1.005 is wanted.\n\n" + "\n".join(lines) + "\n",
    )


def _interval(ratios: list[float]) -> str:
    half = T_95[len(ratios) - 1] * stdev(ratios) / len(ratios) ** 0.5
    return f"{mean(ratios):.4f} ({mean(ratios) - half:.4f} to {mean(ratios) + half:.4f})"


if __name__ == "__main__":
    main()
