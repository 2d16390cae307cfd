"""Samples/s of each layout on two processes, against one process and a hand-written script of the same torch parts.

    python -m benchmarks.layouts [--windows 4] [--steps 6] [--only dp fsdp zero1 tp pp]

A small ViT, the same samples in memory, one thread a process, SGD with momentum, the same global batch. One process,
the script and Echelon are alive at once; a window of steps is granted to one at a time, in turn.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from benchmarks._common import (
    append_result,
    command_line,
    environment_line,
    markdown_table,
    median,
    paired_ratio,
    read_results,
    update_section,
)
from benchmarks._gated import WORLD, Contender, Gate, Windows, fit, gated, gated_run, random_images, take_turns
from benchmarks._layouts_hand import BATCH, MICROBATCHES, SCRIPTS, model

NAME, TITLE = "layouts", "Layouts: samples/s"
PARALLEL = {
    "dp": "dp=2",
    "fsdp": "fsdp=2",
    "zero1": "dp=2,zero1",
    "tp": "tp=2",
    "pp": f"pp=2,schedule=1f1b,microbatches={MICROBATCHES}",
}
SAMPLES = 2048
SAME_SAMPLES = ("one process", "tp", "pp")  # each rank reads the whole batch
ABOUT = (
    f"ViT of 0.8 M parameters on 32x32, global batch {BATCH}, samples in memory, one thread a process; the script, "
    "Echelon and one process alive at once, windows granted in turn; medians of windows, ratios are medians of paired "
    "windows. pp: 1F1B, cut in the middle by both."
)


def by_hand(layout: str, rank: int, gate: Gate) -> None:
    """Run the script of a layout."""
    import torch.distributed as dist
    from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

    data = TensorDataset(*random_images(SAMPLES))
    if layout != "one process":
        dist.init_process_group("gloo")
    whole = layout in SAME_SAMPLES
    sampler: DistributedSampler[Any] = DistributedSampler(data, 1 if whole else WORLD, 0 if whole else rank)
    loader = DataLoader(data, BATCH // (1 if whole else WORLD), sampler=sampler, drop_last=True)
    SCRIPTS[layout](gated(lambda: iter(loader), gate))


def echelon(layout: str, rank: int, gate: Gate) -> None:
    """Run our loop with everything it does: phases, record, curves, progress."""
    settings = {"data.batch_size": BATCH, "strategy.parallel": PARALLEL[layout]}
    settings |= {"strategy.cuts": "blocks.2"} if layout == "pp" else {}
    gated_run(rank, gate, fit, settings, (model(), random_images(SAMPLES)))


def measure(layout: str, windows: int, steps: int) -> dict[str, Windows]:
    """Measure a layout, its script and one process."""
    contenders = {
        "one process": Contender(partial(by_hand, "one process"), ranks=1),
        "hand": Contender(partial(by_hand, layout)),
        "echelon": Contender(partial(echelon, layout)),
    }
    return take_turns(contenders, windows, steps)


def render() -> str:
    """Write the newest result of each layout as a table."""
    newest = {result["layout"]: result for result in read_results(NAME)}
    rows = []
    for layout in [each for each in PARALLEL if each in newest]:
        result = newest[layout]
        seconds = {name: [window[0] for window in each] for name, each in result["windows"].items()}
        rate = {name: median(BATCH * result["steps"] / s for s in each) for name, each in seconds.items()}
        cpu = paired_ratio(*([window[1] for window in result["windows"][name]] for name in ("echelon", "hand")))
        rows.append(
            (
                f"`{PARALLEL[layout]}`",
                f"{rate['one process']:.0f}",
                f"{rate['hand']:.0f}",
                f"{rate['echelon']:.0f}",
                f"{paired_ratio(seconds['hand'], seconds['echelon']):.3f}",
                f"{paired_ratio(seconds['one process'], seconds['echelon']):.2f}",
                f"{cpu:.3f}",
            )
        )
    header = ("layout", "one process", "hand-written", "Echelon", "Echelon / hand-written", "Echelon / one process")
    last = next(reversed(newest.values()))
    line = environment_line(last["command"], last["environment"])
    return f"{line}\n\n{ABOUT}\n\n{markdown_table((*header, 'CPU time, Echelon / hand-written'), rows)}"


def main() -> None:
    """Measure, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=4)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--only", nargs="+", default=list(PARALLEL), choices=list(PARALLEL))
    parser.add_argument("--print", action="store_true", help="leave RESULTS.md and the raw results as they are")
    parser.add_argument("--render", action="store_true", help="the table again, from the raw results")
    options = parser.parse_args()
    for layout in () if options.render else options.only:
        windows = measure(layout, options.windows, options.steps)
        ratio = paired_ratio([w[0] for w in windows["hand"]], [w[0] for w in windows["echelon"]])
        print(f"{layout}: Echelon / hand-written {ratio:.3f}", flush=True)
        if not options.print:
            result = {"layout": layout, "steps": options.steps, "windows": windows}
            append_result(NAME, {**result, "command": command_line("benchmarks.layouts")})
    if not options.print:
        update_section(TITLE, render())


if __name__ == "__main__":
    main()
