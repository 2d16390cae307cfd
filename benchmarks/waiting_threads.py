"""Time a plain step whose two threads wait for each other, spinning long or little, beside whatever else runs.

python -m benchmarks.waiting_threads [--beside N] [--rounds N]: prints a table. `chrt -r 10` before it takes out what
else runs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time

from benchmarks._common import command_line, environment_line, interleave, paired_ratio
from echelon.core.system import short_spins

CONTENDERS = {
    "1 thread": (1, {}),
    "2 threads, spinning as by itself": (2, {}),
    "2 threads, as in a run": (2, short_spins({})),
}
SIZES = {"small": (64, 8), "larger": (128, 32)}  # samples, pixels a side
_WARM = 3


def serve(threads: int, seconds: float) -> None:
    """Be a contender: for each line of input, the name of a size, print the mean seconds of a step."""
    import torch
    from torch import nn

    torch.set_num_threads(threads)
    torch.manual_seed(0)
    layers = [nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for line in sys.stdin:
        samples, side = SIZES[line.strip()]
        images, labels = torch.randn(samples, 1, side, side), torch.randint(0, 10, (samples,))
        steps, begin = -_WARM, time.monotonic()
        while time.monotonic() - begin < seconds or steps < 1:
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()
            optimizer.zero_grad()
            steps += 1
            if not steps:
                begin = time.monotonic()
        print((time.monotonic() - begin) / steps, flush=True)


def main() -> None:
    """Give each contender its turns, in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--beside", type=int, default=0, help="processes that compute all the time beside it")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--serve", type=int, default=0, help="be a contender of so many threads")
    given = parser.parse_args()
    if given.serve:
        serve(given.serve, given.seconds)
        return
    plain = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY", "OMP_NUM_THREADS")}
    command = [sys.executable, "-m", "benchmarks.waiting_threads", "--seconds", str(given.seconds), "--serve"]
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(given.beside)]
    contenders = {
        name: subprocess.Popen(
            [*command, str(threads)], env=plain | variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for name, (threads, variables) in CONTENDERS.items()
    }
    try:
        print(environment_line(command_line("benchmarks.waiting_threads")), f"\nload {os.getloadavg()}\n")
        print("| step | threads | ms a step, median of turns | times one thread |\n|---|---|---|---|")
        for size in SIZES:
            _table(size, contenders, given.rounds)
    finally:
        for other in (*others, *contenders.values()):
            other.kill()
            other.wait()


def _table(size: str, contenders: dict[str, subprocess.Popen[str]], rounds: int) -> None:
    found: dict[str, list[float]] = {name: [] for name in contenders}
    for _, name in interleave(list(contenders), rounds):
        asked, answers = contenders[name].stdin, contenders[name].stdout
        assert asked and answers
        print(size, file=asked, flush=True)
        found[name].append(float(answers.readline()))
    one = found["1 thread"]
    for name, turns in found.items():
        print(
            f"| {size} | {name} | {1e3 * statistics.median(turns):.1f} | {paired_ratio(turns, one):.2f} |", flush=True
        )


if __name__ == "__main__":
    main()
