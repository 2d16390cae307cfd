"""Elastic runs under random faults: who counts each sample, and how often, while workers, machines and links fail.

    python -m benchmarks.elastic_chaos [--faults 20] [--seed 0] [--minutes 10] [--only one|several|split]

Each run trains the counting model (one weight per sample, gradient 1, SGD) with a random strategy on 2 to 4 workers, of
one machine or of 2 to 3, which are network namespaces, or in a layout that divides the model or the optimizer's state,
on one machine. It has `--faults` faults of random kinds at random moments: half
of them come when all workers are there, the others while it may still recover. At least one worker that has what is
trained is always left. Runs begin until `--minutes` are over; seeds rise by one from `--seed`. Results are appended to
`benchmarks/results/elastic_chaos.jsonl`; the table is of all of them (`--minutes 0` only writes it). Exit code 1 when a
run broke a promise.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from benchmarks import _common as common
from benchmarks._elastic_chaos_run import CODECS, KINDS, LAYOUTS, SYNCS, Plan, try_one

NAME, TITLE = "elastic_chaos", "Elastic: random faults"


def summarise() -> str:
    """Write the table of all results."""
    results = common.read_results(NAME)
    rows = []
    for layout in LAYOUTS:
        for codec in CODECS:
            if mine := [r for r in results if (r["plan"].get("layout"), r["plan"]["codec"]) == (layout, codec)]:
                rows.append(_row(_named(layout, codec), False, mine))
    for several in (False, True):
        some = [r for r in results if (r["plan"]["machines"] > 1) == several and not r["plan"].get("layout")]
        for name in SYNCS:
            for codec in CODECS:
                mine = [r for r in some if (r["plan"]["sync"], r["plan"]["codec"]) == (name, codec)]
                if mine:
                    rows.append(_row(_named(name, codec), several, mine))
    kinds = Counter(fault["kind"] for r in results for fault in r["faults"])
    stalls = [(kind, [s for r in results for k, s in r["stalls"] if k == kind]) for kind in KINDS]
    said = [f"{kind}: {kinds[kind]}" + (f" ({common.median(s):.2f} s)" if s else "") for kind, s in stalls]
    head = ["strategy", "machines", "runs", "faults", "finished", "counting held", "each step recorded once",
            "whole restarts"]  # fmt: skip
    total = _row("all", None, results)
    listed = "Faults by kind (median stall to the survivors' next step, of those that struck when all were there): "
    return f"{common.markdown_table(head, [*rows, total])}\n\n{listed}{', '.join(said)}."


def _named(way: str, codec: str) -> str:
    return way if codec == "none" else f"{way}, {codec.partition('(')[0]}"


def _row(name: str, several: bool | None, results: Sequence[dict[str, Any]]) -> list[object]:
    sums = [sum(r[key] for r in results) for key in ("finished", "counted", "recorded", "restarts")]
    where = "" if several is None else "2 or 3" if several else "1"
    return [name, where, len(results), sum(len(r["faults"]) for r in results), *sums]


def main() -> int:
    """Run, or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--only", default="", choices=["one", "several", "split"])
    options = parser.parse_args()
    ends, seed, kept = time.monotonic() + 60 * options.minutes, options.seed, True
    while time.monotonic() < ends:
        result = try_one(Plan.draw(seed, options.faults, options.only))
        common.append_result(NAME, asdict(result))
        print(json.dumps(asdict(result)), flush=True)
        kept, seed = kept and not result.why, seed + 1
    how = (
        "What a run is, is said in `benchmarks/elastic_chaos.py`. No sample may count more than once, and each does "
        "where it can be counted: with a codec, what waited in the memories of the dead is lost; with `easgd`, the "
        "centre follows behind. The machine was shared, by others and by runs beside each other."
    )
    text = f"{how}\n\n{summarise()}"
    common.update_section(TITLE, f"{common.environment_line(f'python -m benchmarks.{NAME}')}\n\n{text}")
    print(text)
    return 0 if kept else 1


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
