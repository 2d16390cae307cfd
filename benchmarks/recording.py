"""What recording costs a run: samples/s of Echelon's loop with all that it records, and with nothing of it.

Same model (1.2 M-parameter CNN), same samples in memory, 2 ranks x 1 thread, global batch 256. Both loops are alive at
once, and a window of steps is granted to one at a time, in turn. The silent loop has the same parts, but its phase
clock does nothing and it closes no window: no sums over the ranks, no record, no curves, no progress.

    python -m benchmarks.recording [--windows 300] [--steps 4]

Windows are short and many: this machine drifts by more than recording costs, and drift cancels only between windows
that lie close together. What recording does every two seconds falls into some windows and not into others, so the cost
is the ratio of sums, with an interval by bootstrap over pairs of windows.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks._common import (
    append_result,
    command_line,
    environment_line,
    markdown_table,
    median,
    update_section,
)
from benchmarks._gated import Contender, Windows, fit, take_turns
from benchmarks.overhead import BATCH, run_of_echelon
from echelon.observe import resources

RESAMPLES = 2000
ABOUT = (
    "2 ranks x 1 thread, a 1.2 M-parameter CNN on 32x32, global batch 256, samples in memory; both loops alive at "
    "once, windows granted in turn. Recording is everything: phases, steps one by one, what ranks use of their "
    "machine, sums over the ranks, record, curves and progress. Cost: seconds of all windows over those of the silent "
    "loop, minus 1, without the pairs that differ most (5% at each end: another process had the core); in brackets 95% "
    "by bootstrap over pairs. The aim is below 1%."
)


class SilentClock:
    """A phase clock that measures nothing."""

    def enter(self, phase: Any) -> None:
        """Do nothing."""

    def split(self, phase: Any, at: object) -> None:
        """Do nothing."""

    def drain(self) -> list[float]:
        """Return nothing."""
        return []

    def so_far(self) -> None:
        """Return nothing."""


def train_silently(run: Any, cursor: Any) -> None:
    """The same steps, and nothing else."""
    run.step._clock = SilentClock()
    for batch in run.train_loader.epoch(0):
        run.schedule.set_step(cursor.step)
        run.step.forward_backward(batch, run.parts.sync)
        run.parts.sync.step()
        cursor.step += 1


def train_recording(run: Any, cursor: Any) -> None:
    """As a run does.

    What the machine's clock makes due goes on in the silent loop's turns: it would come after half as many steps as in
    a run that has the machine to itself, and recording would seem to cost more than it does.
    """
    resources.EVERY_S *= len(LOOPS)
    resources.LIST_CHILDREN_EVERY_S *= len(LOOPS)
    fit(run, cursor)


LOOPS: dict[str, Callable[[Any, Any], None]] = {"silent": train_silently, "recording": train_recording}


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=300)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--print", action="store_true", help="leave RESULTS.md as it is")
    options = parser.parse_args()
    contenders = {name: Contender(partial(run_of_echelon, train=train)) for name, train in LOOPS.items()}
    results = take_turns(contenders, options.windows, options.steps)
    append_result("recording", {"steps": options.steps, "windows": results})
    table = render(results, options.steps)
    print(table)
    if not options.print:
        where = environment_line(command_line("benchmarks.recording"))
        update_section("Cost of recording", f"{where}\n\n{ABOUT}\n\n{table}")


def render(results: dict[str, Windows], steps: int) -> str:
    """Write the table."""
    rows = []
    for name, windows in results.items():
        costs = [_cost([w[i] for w in results["silent"]], [w[i] for w in windows]) for i in (0, 1)]
        rate = median(BATCH * steps / seconds for seconds, _ in windows)
        words = [f"{cost:+.2%} ({low:+.2%} to {high:+.2%})" for cost, low, high in costs]
        rows.append((name, f"{rate:.0f}", *(words if name != "silent" else ("", "")), len(windows)))
    return markdown_table(("loop", "samples/s", "cost in time", "cost in CPU time", "windows"), rows)


def _cost(base: list[float], other: list[float]) -> tuple[float, float, float]:
    """Return by how much the sum of `other` exceeds that of `base`, and a 95% interval of it."""
    pairs = sorted(zip(base, other, strict=True), key=lambda pair: pair[1] / pair[0])
    kept = pairs[len(pairs) // 20 : len(pairs) - len(pairs) // 20]
    found = sorted(_excess(random.Random(seed).choices(kept, k=len(kept))) for seed in range(RESAMPLES))
    return _excess(kept), found[RESAMPLES // 40], found[-RESAMPLES // 40]


def _excess(pairs: list[tuple[float, float]]) -> float:
    return sum(other for _, other in pairs) / sum(base for base, _ in pairs) - 1


if __name__ == "__main__":
    main()
