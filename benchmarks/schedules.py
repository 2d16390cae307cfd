"""How long the ranks of a pipeline compute nothing: measured for each schedule, beside what its paper says.

    python -m benchmarks.schedules                           # about three minutes on two cores that do nothing else
    python -m benchmarks.schedules --width 512 --rounds 9    # shorter computations: what lies between them weighs more
    python -m benchmarks.schedules --render                  # the table again, from the raw results

Two ranks on this machine, a stack of equal blocks (Linear, GELU, Linear, with a residual), float32, one thread a rank,
micro-batches of one size. gpipe and 1f1b have one stage a rank, interleaved and zero_bubble two (four stages in all).
All schedules run in one set of processes and take turns; the idle share of a step is 1 - (time in computations) /
(ranks x time from the first computation to the last), and the figure is the median over the turns. Beside it stands
the same of the same computations, in their order and as long as they took, had nothing lain between them.
"""

from __future__ import annotations

import argparse
import multiprocessing
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks._common import (
    append_result,
    command_line,
    environment_line,
    interleave,
    markdown_table,
    median,
    read_results,
    spread,
    update_section,
)
from benchmarks._schedule_order import seconds_between, without_messages
from echelon.parallel.pipeline import Pipeline, PipelineSettings
from echelon.parallel.pipeline.settings import SCHEDULES
from echelon.records.kinds import PipelineAction, idle_share

NAME = "schedules"
TITLE = "Pipeline schedules: idle share, measured and by formula"
RANKS = 2
BLOCKS = 8
MEASURED = ("gpipe", "1f1b", "interleaved", "zero_bubble")
LIMIT_S = 230.0


@dataclass(frozen=True)
class Plan:
    """What each rank measures."""

    address: tuple[str, int]
    schedules: tuple[str, ...]
    microbatches: tuple[int, ...]
    rounds: int
    width: int
    samples: int


class Block(nn.Module):
    """x + W2 gelu(W1 x)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.rise, self.fall = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Map (N, D) to (N, D)."""
        found: Tensor = x + self.fall(nn.functional.gelu(self.rise(x)))
        return found


def half_square(outputs: Tensor, targets: Tensor) -> Tensor:
    """Stand for a loss: it costs nothing beside the blocks."""
    return 0.5 * outputs[:, 0].square().sum()


def rank_main(plan: Plan, rank: int, results: Any) -> None:
    """Measure all schedules on one rank; rank 0 sends (schedule, micro-batches, `_figures`) of each recorded step."""
    torch.set_num_threads(1)
    wait = timedelta(seconds=60)
    store = dist.TCPStore(*plan.address, RANKS, False, wait)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=wait)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("pp",))
    pairs = [(schedule, count) for count in plan.microbatches for schedule in plan.schedules]
    pipelines = {pair: _pipeline(plan, mesh, *pair) for pair in pairs}
    rows = []
    for _, pair in interleave(pairs, plan.rounds + 2):
        pipeline, count = pipelines[pair], pair[1]
        inputs = torch.randn(count * plan.samples, plan.width)
        dist.barrier()
        pipeline.forward_backward(inputs, torch.zeros(len(inputs), dtype=torch.int64), len(inputs))
        if pipeline.timelines:
            actions = pipeline.timelines.pop()
            rows.append((*pair, _figures(actions)))
        pipeline.zero_grad()
    if rank == 0:
        results.send(rows)
    dist.barrier()
    dist.destroy_process_group()


def _pipeline(plan: Plan, mesh: Any, schedule: str, count: int) -> Pipeline:
    torch.manual_seed(0)
    model = nn.Sequential(*[Block(plan.width) for _ in range(BLOCKS)])
    stages = RANKS * SCHEDULES[schedule].stages_per_rank
    cuts = tuple(str(i * BLOCKS // stages) for i in range(1, stages))
    settings = PipelineSettings(schedule, count, cuts, recorded=plan.rounds)
    return Pipeline(model, None, mesh, settings, half_square, torch.zeros(plan.samples, plan.width))


def _figures(actions: list[PipelineAction]) -> dict[str, Any]:
    kinds = sorted({action.kind for action in actions})
    return {
        "idle": idle_share(actions, RANKS),
        "free": idle_share(without_messages(actions), RANKS),
        "between": seconds_between(actions),
        "seconds": {kind: median(a.end_s - a.begin_s for a in actions if a.kind == kind) for kind in kinds},
    }


def by_formula(schedule: str, count: int, seconds: Mapping[str, float]) -> float:
    """Return the idle share that the paper gives for p ranks, v stages on each, m micro-batches.

    gpipe, 1f1b, interleaved: (p - 1) / (v m + p - 1). zero_bubble (H1): the p - 1 slots that a rank waits are
    F + B - W long in place of F + B + W, with the measured times of forward and of the two halves of backward.
    """
    slots = SCHEDULES[schedule].stages_per_rank * count
    if "weight" not in seconds:
        return (RANKS - 1) / (slots + RANKS - 1)
    whole = seconds["forward"] + seconds["input"] + seconds["weight"]
    waits = (RANKS - 1) * max(0.0, whole - 2 * seconds["weight"])
    return waits / (slots * whole + waits)


def measure(args: argparse.Namespace) -> list[Any]:
    """Run the ranks; returns rank 0's rows."""
    store = dist.TCPStore("127.0.0.1", 0, RANKS, True, timedelta(seconds=60), wait_for_workers=False)
    plan = Plan(
        ("127.0.0.1", store.port),
        tuple(args.schedules),
        tuple(args.microbatches),
        args.rounds,
        args.width,
        args.samples,
    )
    context = multiprocessing.get_context("forkserver")
    here, there = context.Pipe(duplex=False)
    processes = [context.Process(target=rank_main, args=(plan, rank, there), daemon=True) for rank in range(RANKS)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + LIMIT_S
    try:
        while not here.poll(0.5):
            if time.monotonic() > deadline or any(process.exitcode for process in processes):
                raise RuntimeError("the ranks did not finish: see what they printed")
        rows: list[Any] = here.recv()
        return rows
    finally:
        for process in processes:
            process.join(5)
            process.kill()
            process.join()


def record(rows: Sequence[Any], args: argparse.Namespace) -> None:
    """Append one raw result for each schedule and number of micro-batches."""
    for pair in dict.fromkeys((row[0], row[1]) for row in rows):
        mine = [row[2] for row in rows if (row[0], row[1]) == pair]
        kinds = mine[0]["seconds"]
        append_result(
            NAME,
            {
                "schedule": pair[0],
                "microbatches": pair[1],
                "idle": [each["idle"] for each in mine],
                "free": [each["free"] for each in mine],
                "between": median(each["between"] for each in mine),
                "seconds": {kind: median(each["seconds"][kind] for each in mine) for kind in kinds},
                "settings": {"width": args.width, "samples": args.samples},
                "command": command_line("benchmarks.schedules"),
            },
        )


def render() -> str:
    """Write the newest results as a table."""
    newest = {(r["schedule"], r["microbatches"]): r for r in read_results(NAME)}
    counts = sorted({count for _, count in newest})
    rows = []
    for schedule in MEASURED:
        cells: list[str] = [schedule]
        for count in counts:
            result = newest.get((schedule, count))
            if result is None:
                cells += ["", "", ""]
                continue
            cells.append(f"{median(result['idle']):.1%} (±{spread(result['idle']) / 2:.0%})")
            cells.append(f"{median(result['free']):.1%}")
            cells.append(f"{by_formula(schedule, count, result['seconds']):.1%}")
        most = newest.get((schedule, counts[-1]))
        cells.append(f"{most['between'] * 1e3:.2f}" if most else "")
        cells.append(
            ", ".join(f"{kind[0].upper()} {s * 1e3:.0f}" for kind, s in most["seconds"].items()) if most else ""
        )
        rows.append(cells)
    header = ["schedule", *(text for count in counts for text in (f"m={count} measured", "nothing between", "formula"))]
    header += ["ms between", "ms of each"]
    last = next(reversed(newest.values()))
    words = (
        f"{RANKS} ranks, {BLOCKS} equal blocks of width {last['settings']['width']}, micro-batches of "
        f"{last['settings']['samples']} samples; gpipe and 1f1b on 2 stages, interleaved and zero_bubble on 4. "
        "Idle share of a step: median over turns (± half the distance of the quartiles). Formulas: gpipe and 1f1b "
        "(p-1)/(m+p-1), interleaved (p-1)/(v m+p-1), zero_bubble with p-1 waits of F+B-W, from the measured F, B, W. "
        "Nothing between: the same computations, in their order and as long as each took, with no time for messages "
        "and Python; what it has above the formula is that they are not equally long. Ms between: median time between "
        "two computations of a rank of which the second waited for no other rank (m the largest); ms of each: "
        "forward, backward, and its halves, for the inputs and the weights. Where computations are short, the same "
        "time between them weighs more: at width 512 they took a quarter as long, and idle shares at m=16 were 20% "
        "(gpipe), 19% (1f1b), 29% (interleaved) and 31% (zero_bubble). It is torch's Python for each action (0.3 to "
        "0.7 ms of the rank's own CPU time) and messages, whose threads share two cores with two computing ranks."
    )
    line = environment_line(last["command"], last["environment"])
    return f"{line}\n\n{words}\n\n{markdown_table(header, rows)}"


def main() -> None:
    """Measure or render."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schedules", nargs="+", default=list(MEASURED), choices=list(SCHEDULES))
    parser.add_argument("--microbatches", nargs="+", type=int, default=[4, 8, 16])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--samples", type=int, default=64)
    parser.add_argument("--render", action="store_true")
    args = parser.parse_args()
    if not args.render:
        record(measure(args), args)
    update_section(TITLE, render())


if __name__ == "__main__":
    main()
