"""Sums in the order in which forward needs them, against the order in which backward makes them: a VGG-like network.

    python -m benchmarks.priority --link 1gbit --ranks 2 --samples 64

Each rank is in a network namespace of its own, behind a shaped link, and has both models; they take turns.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from datetime import timedelta
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
from benchmarks._priority_worker import ORDERS, RankPlan
from benchmarks._priority_worker import measure as measure_rank
from benchmarks._ranks import of_ranks
from echelon.launch.link import ShapedNetwork, parse_link
from echelon.observe.phases import PHASE_NAMES

NAME, TITLE = "priority", "Priority: sums in the order of the forward pass"
ABOUT = """Five convolutions and two dense layers at the end (10.9 M parameters, 43.6 MB of gradients), SGD with
momentum, no codec. `ready` is `--collective backend`, `priority` is `--collective "backend(order=priority)"`. Both
models are in the same processes and take turns of a few steps; a turn ends when its last update is made. Seconds per
step are medians over the turns, of the slowest rank; the ratio is that of neighbouring turns, ready / priority, its
median and 90% interval (bootstrap). Samples are of a rank; on a device, each layer takes 2 ms and 4.4 ms per sample,
shared out by operations, in which the processor is free, as beside a GPU. Seconds by phase are medians over turns and
ranks; waits are for sums that nothing hides."""
REDRAWS = 2000


def measure(link: str, ranks: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return, of each rank, its turns by order."""
    from torch.distributed import TCPStore

    with ShapedNetwork(ranks, parse_link(link)) as network:
        store = TCPStore("0.0.0.0", 0, ranks, True, timedelta(seconds=60), wait_for_workers=False)
        plans = [
            RankPlan(
                rank, ranks, network.hosts[rank], (network.host_address, store.port), args.samples, args.on_device,
                args.steps, args.turns, 60,
            )
            for rank in range(ranks)
        ]  # fmt: skip
        return of_ranks(measure_rank, plans, args.limit)


def _record(link: str, args: argparse.Namespace, ranks: Sequence[dict[str, Any]]) -> None:
    seconds = {o: [max(turn) for turn in zip(*([t.seconds for t in r[o]] for r in ranks), strict=True)] for o in ORDERS}
    phases = {
        order: dict(zip(PHASE_NAMES, _medians([t.phases for rank in ranks for t in rank[order]]), strict=True))
        for order in ORDERS
    }
    cpu_s = {order: median(t.cpu_s for rank in ranks for t in rank[order]) for order in ORDERS}
    append_result(
        NAME,
        {
            "link": link, "ranks": len(ranks), "samples": args.samples, "steps": args.steps, "seconds": seconds,
            "on_device": args.on_device, "phases": phases, "cpu_s": cpu_s,
            "command": command_line("benchmarks.priority"),
        },
    )  # fmt: skip


def _medians(rows: Sequence[Sequence[float]]) -> list[float]:
    return [median(column) for column in zip(*rows, strict=True)]


def interval(above: Sequence[float], below: Sequence[float]) -> tuple[float, float]:
    """Return between which the median ratio of pairs lies in nine of ten redraws of the pairs."""
    pairs, draws = [*zip(above, below, strict=True)], random.Random(0)
    redrawn = sorted(paired_ratio(*zip(*draws.choices(pairs, k=len(pairs)), strict=True)) for _ in range(REDRAWS))
    return redrawn[REDRAWS // 20], redrawn[-REDRAWS // 20]


def render() -> str:
    """Write the newest result of each link, number of ranks and part of a batch."""
    newest = {(r["link"], r["ranks"], _computes(r)): r for r in read_results(NAME)}
    rows = []
    for key in sorted(newest):
        result = newest[key]
        ready, priority = (result["seconds"][order] for order in ORDERS)
        low, high = interval(ready, priority)
        shares = [_phases(result["phases"][order]) for order in ORDERS]
        shares.append(" / ".join(f"{result['cpu_s'][order]:.3f}" for order in ORDERS))
        ratio = f"{paired_ratio(ready, priority):.2f} ({low:.2f} to {high:.2f})"
        rows.append([*key, f"{median(ready):.3f}", f"{median(priority):.3f}", ratio, *shares])
    header = [
        "link", "ranks", "a rank computes", "ready, s/step", "priority, s/step", "ready / priority",
        "ready: forward, backward, waits, update, s", "priority: the same",
        "processor of a rank, ready / priority, s",
    ]  # fmt: skip
    last = newest[max(newest, key=lambda key: newest[key]["time"])]
    return "\n\n".join([ABOUT, environment_line(last["command"], last["environment"]), markdown_table(header, rows)])


def _computes(result: dict[str, Any]) -> str:
    return f"{result['samples']} samples{' on a device' * result['on_device']}"


def _phases(phases: dict[str, float]) -> str:
    return ", ".join(f"{phases[name]:.3f}" for name in ("forward", "backward", "communicate", "update"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", default="1gbit")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--samples", type=int, default=64, help="of a rank's part of a batch")
    parser.add_argument("--on-device", action="store_true", help="layers take their time without a processor")
    parser.add_argument("--steps", type=int, default=10, help="of a turn")
    parser.add_argument("--turns", type=int, default=7, help="of each order")
    parser.add_argument("--limit", type=float, default=300, help="seconds for one number of ranks")
    parser.add_argument("--render", action="store_true", help="only write the table again")
    parser.add_argument("--no-table", action="store_true", help="print the table instead of writing it to RESULTS.md")
    args = parser.parse_args()
    for ranks in [] if args.render else args.ranks:
        _record(args.link, args, measure(args.link, ranks, args))
    if args.no_table:
        print(render())
    else:
        update_section(TITLE, render())


if __name__ == "__main__":
    main()
