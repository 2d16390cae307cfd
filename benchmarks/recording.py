"""What recording costs a run: samples/s of Echelon's loop with all that it records, and with nothing of it.

Same model (1.2 M-parameter CNN), same samples in memory, 2 ranks x 1 thread, global batch 256. Both loops are alive at
once, and a window of steps is granted to one at a time, in turn. The silent loop has the same parts, but its phase
clock does nothing and it closes no window: no sums over the ranks, no record, no curves, no progress.

    python -m benchmarks.recording [--windows 9] [--steps 40]
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks._common import (
    append_result,
    command_line,
    environment_line,
    markdown_table,
    median,
    paired_ratio,
    spread,
    update_section,
)
from benchmarks._gated import Contender, Windows, fit, take_turns
from benchmarks.overhead import BATCH, run_of_echelon

ABOUT = (
    "2 ranks x 1 thread, a 1.2 M-parameter CNN on 32x32, global batch 256, samples in memory; both loops alive at "
    "once, windows granted in turn; medians of windows, ratios are medians of paired windows. Recording is everything: "
    "phases, steps one by one, what ranks use of their machine, sums over the ranks, record, curves and progress. The "
    "aim is below 1%."
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


LOOPS: dict[str, Callable[[Any, Any], None]] = {"silent": train_silently, "recording": fit}


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=9)
    parser.add_argument("--steps", type=int, default=40)
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
    base, base_cpu = ([window[i] for window in results["silent"]] for i in (0, 1))
    rows = []
    for name, windows in results.items():
        seconds, cpu = [w[0] for w in windows], [w[1] for w in windows]
        rate = median(BATCH * steps / s for s in seconds)
        ratio, cpu_ratio = paired_ratio(base, seconds), paired_ratio(cpu, base_cpu)
        rows.append((name, f"{rate:.0f}", f"{ratio:.3f}", f"{cpu_ratio:.3f}", f"{spread(seconds):.1%}"))
    header = ("loop", "samples/s", "ratio to silent", "CPU ratio", "windows differ by (quartiles)")
    return markdown_table(header, rows)


if __name__ == "__main__":
    main()
