"""What it costs without a death that survivors of one could go on: processor time of a step, `--elastic on` over `off`.

Two runs differ by more than it costs. So three things are measured in the same runs: the processor time of all, and,
within each, that of what a step does for it and of the thread that looks who is there.

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from benchmarks._common import command_line, environment_line, update_section
from echelon.trainer import batches

WARM = 50  # steps that are not counted
NOTES = "ECHELON_COST_NOTES"
WAYS = {
    "off": ("--elastic", "off"),
    "on, equal parts": ("--elastic", "on", "--balance", "off"),
    "on": ("--elastic", "on"),
}
MODELS = {"small_cnn": "no buffers", "timm/test_efficientnet": "BatchNorm"}
THREAD = "echelon-terms"
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


@dataclass(frozen=True)
class Used:
    """Processor seconds of a step, of both workers together.

    Attributes:
        whole_s: of the processes.
        noted_s: of what their main threads do in each step so that others can go on.
        looks_s: of the threads that look who is there.
    """

    whole_s: float
    noted_s: float
    looks_s: float


class TimedSGD(torch.optim.SGD):
    """SGD that notes the processor time of its process for a step, now and then; one that is only tried has others."""

    taken = 0

    def step(self, closure: Any = None) -> Any:
        """Update, and note."""
        result = super().step(closure)
        self.taken += 1
        if self.taken == WARM:
            own_work.begin()
        elif self.taken > WARM and self.taken % WARM == 0 and (folder := os.environ.get(NOTES)):
            used = " ".join(str(seconds / (self.taken - WARM)) for seconds in own_work.used())
            Path(folder, f"{os.getpid()}-{id(self)}").write_text(f"{self.taken} {used}")
        return result


class OwnWork:
    """Times what this process does so that others can go on without it, with the caches as its steps leave them."""

    def __init__(self) -> None:
        self._noted_ns = 0
        self._before = (0.0, 0.0, 0.0)
        self._is_timed = False

    def begin(self) -> None:
        """Begin anew."""
        if not self._is_timed:
            self._is_timed = True
            batches.EpochOrder.note = self._timed(batches.EpochOrder.note)  # type: ignore[method-assign]
            batches.seed_layers = self._timed(batches.seed_layers)
        self._before = self._so_far()

    def used(self) -> tuple[float, ...]:
        """Return the processor seconds since then: of the process, of notes, of looks."""
        return tuple(now - before for now, before in zip(self._so_far(), self._before, strict=True))

    def _so_far(self) -> tuple[float, float, float]:
        looks = [thread.ident for thread in threading.enumerate() if thread.name == THREAD and thread.ident]
        looks_s = sum(time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in looks)
        return time.process_time(), self._noted_ns / 1e9, looks_s

    def _timed(self, work: Callable[..., None]) -> Callable[..., None]:
        def timed(*arguments: Any, **named: Any) -> None:
            began_ns = time.thread_time_ns()
            work(*arguments, **named)
            self._noted_ns += time.thread_time_ns() - began_ns

        return timed


own_work = OwnWork()


def used(model: str, steps: int, ways: Sequence[str]) -> dict[str, Used]:
    """Train digits with two workers in each way, all at once, so that what disturbs one disturbs all.

    Returns:
        The processor time of a step, by way.
    """
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


def _noted(folder: Path, steps: int) -> Used:
    told = [file.read_text().split() for file in (folder / "notes").iterdir()]
    workers = [list(map(float, seconds)) for count, *seconds in told if int(count) == steps]
    if len(workers) != 2:
        raise SystemExit(f"{folder}: {told}")
    return Used(*map(sum, zip(*workers, strict=True)))


def main() -> None:
    """Measure, print and write the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=16)
    parser.add_argument("--steps", type=int, default=600, help=f"a multiple of {WARM}")
    options = parser.parse_args()
    lines = []
    for model, kind in MODELS.items():
        found = [used(model, options.steps, _turned(list(WAYS), turn)) for turn in range(options.rounds)]
        alone = [
            {way: used(model, options.steps, [way])[way] for way in _turned(["off", "on"], turn)}
            for turn in range(options.rounds)
        ]
        off_ms = 1000 * mean(each["off"].whole_s for each in found)
        lines.append(f"- `{model}` ({kind}), {off_ms:.1f} ms of processor time a step for two workers")
        lines += [f"    - {way}: {_told(way, found)}" for way in WAYS if way != "off"]
        lines.append(f"    - on, nothing beside: {_told('on', alone)}")
        print("\n".join(lines[-len(WAYS) - 1 :]), flush=True)
    update_section(
        "Elastic: what it costs without a death",
        f"{environment_line(command_line('benchmarks.elastic_cost'))}\n\n"
        f"Three runs at once, {options.rounds} times, so that what disturbs one disturbs all: means of their ratios, "
        "and a 95% interval; at most 1.005 is wanted. `timed within`: by the clocks of threads, in the same runs. "
        "Beside each other the runs' steps take three times as long, and the thread looks three times as often.\n\n"
        + "\n".join(lines)
        + "\n",
    )


def _told(way: str, found: Sequence[Mapping[str, Used]]) -> str:
    ratios = [each[way].whole_s / each["off"].whole_s for each in found]
    own = [each[way].noted_s - each["off"].noted_s for each in found]  # both are timed alike
    looks = [each[way].looks_s for each in found]
    parts = [100 * (o + seen) / each["off"].whole_s for o, seen, each in zip(own, looks, found, strict=True)]
    return (
        f"{_interval(ratios)} of the processor time of `off`; timed within: {_interval(parts, 2)} percent more, "
        f"{mean(own) / 2 * 1e6:.0f} us of a worker's step and {mean(looks) / 2 * 1e6:.0f} us of its thread"
    )


def _turned(ways: Sequence[str], turn: int) -> list[str]:
    return [*ways[turn % len(ways) :], *ways[: turn % len(ways)]]


def _interval(values: Sequence[float], digits: int = 4) -> str:
    half = T_95[len(values) - 1] * stdev(values) / len(values) ** 0.5
    return f"{mean(values):.{digits}f} ({mean(values) - half:.{digits}f} to {mean(values) + half:.{digits}f})"


if __name__ == "__main__":
    main()
