"""What it costs without a death that survivors of one could go on, within one run: done, and left out, in turns.

Two runs differ by more than it costs, and clocks around what is done do not see what it costs the rest: caches, and
waits for the interpreter's lock. So both workers of a run with `--elastic on` do what a step does for others in some
steps, and leave it out in as many, in the order ABBA; the processor time of their whole processes is compared, pair by
pair. The thread that looks who is there looks at nothing meanwhile, but still wakes.

python -m benchmarks.elastic_turns [--steps 20000]
"""

from __future__ import annotations

import argparse
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks._common import append_result, command_line, environment_line, update_section
from echelon.trainer.batches import EpochOrder
from echelon.trainer.membership import Membership

TITLE = "Elastic: what it costs within a run"
MODELS = {"small_cnn": "no buffers", "timm/test_efficientnet": "BatchNorm"}
TURN = 25  # steps
WARM = 200  # steps that are not counted
NOTES = "ECHELON_TURNS_NOTES"


class Turns:
    """Lets this process do, or leave out, what a step does for others; notes the processor seconds of each turn."""

    def __init__(self) -> None:
        self._does, self._began_s = True, 0.0
        self._took_s: list[float] = []
        self._lines: list[str] = []
        note, hear = EpochOrder.note, Membership._hear

        def note_in_turn(batches: EpochOrder, between: bool) -> None:
            if self._does:
                note(batches, between)

        def hear_in_turn(membership: Membership) -> bool:
            return hear(membership) if self._does else membership._must

        EpochOrder.note = note_in_turn  # type: ignore[method-assign]
        Membership._hear = hear_in_turn  # type: ignore[method-assign]

    def step_done(self, taken: int) -> None:
        """Count a step; every `TURN` of them the other turn begins."""
        if taken < WARM or taken % TURN:
            return
        now_s = time.process_time()
        if self._began_s:
            self._lines.append(f"{int(self._does)} {now_s - self._began_s}")
        if len(self._lines) % 40 == 0:
            Path(os.environ[NOTES], str(os.getpid())).write_text("\n".join(self._lines))
        self._does = len(self._lines) % 4 in (0, 3)
        self._began_s = time.process_time()


class SGDInTurns(torch.optim.SGD):
    """SGD that tells the turns of its process of each step."""

    taken = 0
    turns: Turns | None = None

    def step(self, closure: Any = None) -> Any:
        """Update, and tell."""
        result = super().step(closure)
        self.taken += 1
        if self.taken == 2:  # one that is only tried takes a single step
            SGDInTurns.turns = SGDInTurns.turns or Turns()
        if SGDInTurns.turns is not None:
            SGDInTurns.turns.step_done(self.taken)
        return result


def ratios(model: str, steps: int) -> tuple[list[float], float]:
    """Train with two workers; returns the ratio of each pair of turns, and the processor seconds of a step of both."""
    with tempfile.TemporaryDirectory() as root:
        notes = Path(root) / "notes"
        notes.mkdir()
        command = [sys.executable, "-m", "echelon", "train", "digits", "--model", model, "--workers", "2"]
        command += ["--threads", "1", "--device", "cpu", "--max-steps", str(steps), "--epochs", "10000"]
        command += ["--eval-every", "0", "--batch-size", "64", "--run", f"{root}/run", "--elastic", "on"]
        command += ["--balance", "off", "--lr", "0.001", "--optimizer", "benchmarks.elastic_turns:SGDInTurns"]
        subprocess.run(
            command, env={**os.environ, NOTES: str(notes)}, stdout=subprocess.DEVNULL, timeout=1800, check=True
        )
        workers = [[line.split() for line in file.read_text().splitlines()] for file in notes.iterdir()]
    if len(workers) != 2:
        raise SystemExit(f"{len(workers)} workers told of their turns")
    turns = [(does, float(a) + float(b)) for (does, a), (_, b) in zip(*workers, strict=False)]
    pairs = [turns[i : i + 2] for i in range(0, len(turns) - 1, 2)]
    found = [dict(pair)["1"] / dict(pair)["0"] for pair in pairs]
    return found, median(seconds for _, seconds in turns) / TURN


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the bounds of the median's 95% interval, by the order of the values (binomial)."""
    ordered, half = sorted(values), 0.98 * math.sqrt(len(values))
    low, high = math.floor(len(values) / 2 - half), math.ceil(len(values) / 2 + half)
    return ordered[max(0, low)], ordered[min(len(values) - 1, high)]


def main() -> None:
    """Measure, print and write the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20000)
    options = parser.parse_args()
    lines = []
    for model, kind in MODELS.items():
        found, step_s = ratios(model, options.steps)
        low, high = interval(found)
        append_result("elastic_turns", {"model": model, "ratios": found, "step_s": step_s})
        lines.append(
            f"- `{model}` ({kind}), {1e3 * step_s:.1f} ms of processor time a step for two workers: "
            f"{median(found):.4f} ({low:.4f} to {high:.4f}) times, {len(found)} pairs"
        )
        print(lines[-1], flush=True)
    update_section(
        TITLE,
        f"{environment_line(command_line('benchmarks.elastic_turns'))}\n\n"
        f"Processor time of both workers' processes, done over left out, in turns of {TURN} steps of one run: the "
        "median of adjacent pairs, with its 95% interval; at most 1.005 is wanted.\n\n" + "\n".join(lines) + "\n",
    )


if __name__ == "__main__":
    main()
