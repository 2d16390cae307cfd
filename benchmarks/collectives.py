"""Each path against gloo's own all-reduce: loopback, shaped links, and groups with fast links inside.

    python -m benchmarks.collectives                                   # everything, about ten minutes
    python -m benchmarks.collectives --links loopback --ranks 2 --sizes 1024 1048576 --rounds 3
    python -m benchmarks.collectives --render                          # the table again, from the raw results

Paths take turns in one set of processes; a ratio is gloo's seconds over the path's own in turns side by side (above 1:
faster than gloo), the median over the turns; seconds are the slowest rank's. One thread for each rank.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from benchmarks._collectives_worker import CHOSEN, RankPlan
from benchmarks._collectives_worker import measure as measure_rank
from benchmarks._common import (
    append_result,
    command_line,
    environment_line,
    markdown_table,
    median,
    ratio_in_words,
    read_results,
    update_section,
)
from benchmarks._ranks import of_ranks
from echelon.core.units import format_bytes, format_seconds
from echelon.launch.link import ShapedNetwork, parse_link

NAME = "collectives"
TITLE = "Collectives: each path against gloo's own all-reduce"
BACKEND, FORMER_BACKEND = "backend", "auto"  # older results have the former name
PATHS = (BACKEND, CHOSEN, "ring", "halving_doubling", "direct", "hierarchical(group=2)")
SIZES = (1 << 10, 16 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20, 64 << 20)
LINKS = ("loopback", "1gbit", "100mbit", "groups")
GROUPS = ("100mbit", "1gbit")  # between two groups, and inside them
RATES = {"1gbit": 125e6, "100mbit": 12.5e6, "groups": 12.5e6, "loopback": 400e6}
ABOUT = (
    "Ratios are gloo's seconds over the path's own, medians of turns side by side with their quartiles (above 1: "
    "faster than gloo). Between two ranks every path is the backend's own all-reduce: what differs from 1 there is "
    "noise. Measured with real-time priority (`chrt -r 10` before the command), so that other processes of the machine "
    "take no part."
)
MAX_SUM_S = 3.0  # sizes whose sum would take longer on a link are left out


def measure(link: str, ranks: int, args: argparse.Namespace) -> dict[tuple[str, int], list[float]]:
    """Run all paths and sizes on one kind of link; returns the seconds of each turn, as the slowest rank saw them."""
    sizes = tuple(s for s in args.sizes if 2 * s / RATES.get(link, 1e6) <= MAX_SUM_S)
    with _network(link, ranks) or nullcontext() as network:
        address = network.host_address if network else "127.0.0.1"
        store = dist.TCPStore(address, 0, ranks, True, timedelta(seconds=60), wait_for_workers=False)
        plans = [
            RankPlan(
                rank,
                ranks,
                network.hosts[rank] if network else None,
                (address, store.port),
                tuple(args.paths),
                sizes,
                args.rounds,
                args.window,
                timeout_s=60,
            )
            for rank in range(ranks)
        ]
        return of_ranks(measure_rank, plans, args.limit)[0]


def _network(link: str, ranks: int) -> ShapedNetwork | None:
    if link == "loopback":
        return None
    if link == "groups":
        return ShapedNetwork(ranks, parse_link(GROUPS[0]), groups=2, inner=parse_link(GROUPS[1]))
    return ShapedNetwork(ranks, parse_link(link))


def _record(link: str, ranks: int, seconds: dict[tuple[str, int], list[float]]) -> None:
    """Append one raw result for each size."""
    command = command_line("benchmarks.collectives")
    for size in sorted({size for _, size in seconds}):
        of_size = {path: turns for (path, n), turns in seconds.items() if n == size}
        append_result(NAME, {"link": link, "ranks": ranks, "bytes": size, "seconds": of_size, "command": command})


def render() -> str:
    """Write the newest results of each link and number of ranks as tables."""
    newest: dict[tuple[str, int, int], dict[str, Any]] = {}
    for result in read_results(NAME):
        newest[result["link"], result["ranks"], result["bytes"]] = result
    parts = []
    for link in LINKS:
        for ranks in sorted({r for name, r, _ in newest if name == link}):
            found = [newest[key] for key in sorted(newest) if key[:2] == (link, ranks)]
            kind = f"two groups, {GROUPS[1]} inside and {GROUPS[0]} between" if link == "groups" else link
            where = environment_line(found[-1]["command"], found[-1]["environment"])
            parts += [f"**{ranks} ranks, {kind}** ({where})", _table(found)]
    return "\n\n".join([ABOUT, *parts])


def _table(found: Sequence[dict[str, Any]]) -> str:
    known = dict.fromkeys(path for result in found for path in result["seconds"])  # older rows lack newer paths
    paths = [p for p in known if p != BACKEND and (p != FORMER_BACKEND or BACKEND in known)]
    rows = []
    for result in found:
        seconds = result["seconds"]
        backend = seconds[BACKEND if BACKEND in seconds else FORMER_BACKEND]
        ratios = [ratio_in_words(backend, seconds[p]) if p in seconds else "" for p in paths]
        rate = f"{result['bytes'] / median(backend) / 1e6:.4g}"
        rows.append([format_bytes(result["bytes"]), format_seconds(median(backend)), rate, *ratios])
    return markdown_table(["vector", "gloo", "MB/s", *(f"{p} / gloo" for p in paths)], rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--links", nargs="+", default=list(LINKS), help="loopback, a rate such as 100mbit, or groups")
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--sizes", nargs="+", type=int, default=list(SIZES), help="bytes")
    parser.add_argument("--paths", nargs="+", default=list(PATHS))
    parser.add_argument("--rounds", type=int, default=7, help="turns of each path")
    parser.add_argument("--window", type=float, default=0.3, help="seconds of a turn")
    parser.add_argument("--limit", type=float, default=600, help="seconds for one kind of link")
    parser.add_argument("--render", action="store_true", help="only write the tables again")
    parser.add_argument(
        "--no-table", action="store_true", help="print the tables instead of writing them to RESULTS.md"
    )
    args = parser.parse_args()
    if BACKEND not in args.paths:
        args.paths.insert(0, BACKEND)
    for link in [] if args.render else args.links:
        for ranks in args.ranks if link != "groups" else [4]:
            _record(link, ranks, measure(link, ranks, args))
    if args.no_table:
        print(render())
    else:
        update_section(TITLE, render())


if __name__ == "__main__":
    main()
