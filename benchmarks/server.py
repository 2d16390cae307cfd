"""Goodput of a server: push and pull with plain SGD, against a raw ZeroMQ echo of the same sizes, and over links.

    python -m benchmarks.server [--sizes 1 5 50] [--windows 5] [--seconds 1] [--chunk-kb 1024]
    python -m benchmarks.server --links 100mbit 1gbit        # network namespaces: root

For each size in MB, a worker process pushes a gradient of that size in keys and pulls the new values, again and again
as the training does: a key is pushed again as soon as its new value has come. The echo is a plain pyzmq DEALER that
sends messages to a ROUTER in another process over loopback TCP, which sends them back, and sends each again as soon as
it has come: one message of the whole size, and as many as there are keys, of a key's size, all on their way at once. On
one machine a run's roles talk over Unix sockets (first columns); between machines over TCP with CURVE encryption, which
is compared with an echo that has it too, in messages of a key's size. Goodput counts payload bytes, both directions
added. Windows are interleaved; medians are shown.

Over links every process has a network namespace with a shaped link of its own, and all is encrypted. The share is
payload bytes in one direction against the link's rate.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from typing import Any

from benchmarks._common import (
    append_result,
    command_line,
    environment_line,
    interleave,
    markdown_table,
    median,
    update_section,
)
from benchmarks._server_sides import PRELOAD, Case, Side
from echelon.launch.link import ShapedNetwork, parse_link
from echelon.ps.table import Cut, ParameterInfo, cut_table
from echelon.sync.ps import ServerSettings

LOOPBACK = ["MB", "in keys of KiB", "push+pull MB/s", "echo of the whole MB/s", "ratio", "echo in keys", "ratio",
            "the same, Unix socket", "ratio", "encrypted: push+pull", "echo in keys", "ratio"]  # fmt: skip
LINKS = ["link", "MB", "1 worker, 1 server: MB/s each way", "share of the link", "2 workers, 1 server", "2 workers, "
         "2 servers", "gain"]  # fmt: skip


def loopback(size: float, chunk_kb: int, given: argparse.Namespace) -> list[str]:
    """Measure one size on this machine; returns a row of the table."""
    n_bytes, chunk = int(size * 1e6) // 4 * 4, chunk_kb * 1024
    one = key_bytes(n_bytes, chunk)
    echoes = [Case("echo", n_bytes, n_bytes), Case("echo", n_bytes, one), Case("echo", n_bytes, one, local=True)]
    hidden = [Case("ps", n_bytes, chunk, True), Case("echo", n_bytes, one, True)]
    rates = measure([Case("ps", n_bytes, chunk), *echoes, *hidden], given.windows, given.seconds)
    append_result("server", {"mb": size, "chunk": chunk, "key": one, "rates": rates, "link": "", "whole": True})
    ps, *raw, curve, curve_raw = (median(r) / 1e6 for r in rates)
    against = [cell for echo in raw for cell in (f"{echo:.0f}", f"{ps / echo:.2f}")]
    return [f"{size:g}", f"{one / 1024:.0f}", f"{ps:.0f}", *against,
            f"{curve:.0f}", f"{curve_raw:.0f}", f"{curve / curve_raw:.2f}"]  # fmt: skip


def key_bytes(n_bytes: int, chunk: int) -> int:
    """Return the bytes of the largest key of one parameter of so many bytes."""
    table = cut_table([ParameterInfo("w", (n_bytes // 4,), True)], Cut(1, chunk))
    return 4 * max(key.numel for key in table.keys)


def over_links(link: str, size: float, given: argparse.Namespace) -> list[str]:
    """Measure one size on shaped links; returns a row of the table."""
    n_bytes, chunk = int(size * 1e6) // 4 * 4, given.chunk_kb[0] * 1024
    with ShapedNetwork(4, parse_link(link)) as network:
        workers, servers = tuple(network.hosts[:2]), tuple(network.hosts[2:])
        pairs = [(workers[:1], servers[:1]), (workers, servers[:1]), (workers, servers)]
        cases = [Case("ps", n_bytes, chunk, True, workers=w, servers=s) for w, s in pairs]
        rates = measure(cases, given.windows, max(given.seconds, 16 * n_bytes / parse_link(link).rate_bits_per_s))
    append_result("server", {"mb": size, "chunk": chunk, "rates": rates, "link": link})
    one, shared, spread = (median(r) / 2e6 for r in rates)
    share = one / (parse_link(link).rate_bits_per_s / 8e6)
    return [link, f"{size:g}", f"{one:.1f}", f"{share:.2f}", f"{shared:.1f}", f"{spread:.1f}", f"{spread / shared:.2f}"]


def measure(cases: list[Case], windows: int, seconds: float) -> list[list[float]]:
    """Return each case's rates, window by window, interleaved."""
    sides: list[Side] = []
    try:
        for case in cases:
            sides.append(Side(case))
        rates: list[list[float]] = [[] for _ in cases]
        for _, i in interleave(range(len(cases)), windows):
            rates[i].append(sides[i].window(seconds))
        return rates
    finally:
        for side in sides:
            side.close()


def write(title: str, header: list[str], rows: list[list[str]], words: str) -> None:
    """Show a table and put it into the results."""
    table = markdown_table(header, rows)
    print(table, flush=True)
    update_section(title, f"{words}\n\n{environment_line(command_line('benchmarks.server'))}\n\n{table}")


def main() -> None:
    """Measure, print, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=float, nargs="*", default=[1, 5, 50], help="MB")
    parser.add_argument("--windows", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument("--chunk-kb", type=int, nargs="+", default=[ServerSettings().chunk_bytes // 1024],
                        help="largest key, in KiB; links: the first one")  # fmt: skip
    parser.add_argument("--links", nargs="*", default=[], help="rates such as 100mbit; empty: loopback")
    given = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    rows: list[Any]
    if given.links:
        rows = [over_links(link, size, given) for link in given.links for size in given.sizes]
        words = (
            "Every process in a namespace with a shaped link of its own; TCP with CURVE. MB/s are payload, one "
            "direction, all workers together; with two workers a single server's link is the bottleneck."
        )
        write("Parameter server: goodput over links", LINKS, rows, words)
    else:
        rows = [loopback(size, chunk_kb, given) for size in given.sizes for chunk_kb in given.chunk_kb]
        words = (
            "Payload MB/s, both directions added; plain SGD on the server. Plain: Unix sockets, as roles on one "
            "machine use, against a raw pyzmq DEALER/ROUTER echo over loopback TCP: of one message of the whole size, "
            "and of messages of a key's size, all on their way at once (over a Unix socket too); encrypted: TCP with "
            f"CURVE against an echo with CURVE. Medians of {given.windows} interleaved windows."
        )
        write("Parameter server: goodput on one machine", LOOPBACK, rows, words)


if __name__ == "__main__":
    main()
