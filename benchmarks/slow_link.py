"""Plain DDP, torch's own hooks and every codec of Echelon on slow links: samples/s, and seconds to a test accuracy.

2 workers x 1 thread, a 1.2 M-parameter CNN, CIFAR-10 in memory, global batch 256, SGD with momentum. All candidates run
in the same plain DDP loop. Needs root (network namespaces). Raw results go to benchmarks/results/slow_link.jsonl.

    python -m benchmarks.slow_link --mode rate       # samples/s; candidates take turns, each beside itself on loopback
    python -m benchmarks.slow_link --mode curve      # accuracy by step, over loopback; then with --schedule cosine
    python -m benchmarks.slow_link --mode accuracy   # seconds to the accuracy on the links, if under 10 minutes
    python -m benchmarks.slow_link --mode aborts --candidates 'echelon:powersgd(2)' --runs 50
    python -m benchmarks.slow_link --mode render     # tables into benchmarks/RESULTS.md (--print: to the terminal)

Whole runs of `echelon train` over such links are measured by `benchmarks.slow_runs`.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import multiprocessing as mp
import os
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from benchmarks import _slow_link_tables as tables
from benchmarks._common import append_result, command_line, interleave, read_results
from benchmarks._slow_link_pair import CandidateFailed, Pair, Terms, Window
from echelon.core.errors import USER_ERROR_EXIT_CODE, UserError
from echelon.core.system import IMPORTED_BY_OPTIMIZERS
from echelon.launch.link import ShapedNetwork, check_link, parse_link

NAME = "slow_link"
PEERS = ["ddp", "torch-fp16", "torch-powersgd(1)", "torch-powersgd(2)", "torch-postlocal(8)"]
DEFAULT_BUCKETS = ["torch-powersgd-buckets(1)", "torch-powersgd-buckets(2)"]
CODECS = [
    "none", "bf16", "fp16", "int8", "qsgd(levels=16)", "ternary", "sign", "threshold(density=0.01)", "topk(0.01)",
    "topk(0.01)+huffman", "randomk(0.01)", "powersgd(1)", "powersgd(2)", "powersgd(4)",
]  # fmt: skip
STRATEGIES = ["sync:local(8)", "sync:local(8);int8", "sync:diloco(50)", "sync:diloco(50);int8"]
CANDIDATES = [*PEERS, *(f"echelon:{codec}" for codec in CODECS), *STRATEGIES]
LINKS = ["1gbit", "100mbit", "10mbit"]
MOST_STEPS = 32
STEPS_PER_EPOCH = 50_000 // tables.BATCH
MEASURED_LIMIT_S = 600.0
TOO_FEW_POINTS = "no accuracy to aim at yet: run --mode curve --candidates ddp first"


def main() -> None:
    """Run one mode."""
    options = _options()
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # the store cannot name addresses of a namespace, and warns
    os.environ["OMP_NUM_THREADS"] = "1"
    mp.set_forkserver_preload(["torch", IMPORTED_BY_OPTIMIZERS, "torch.distributed", "benchmarks._slow_link_worker"])
    modes = {"rate": rate, "curve": curve, "accuracy": accuracy, "aborts": aborts, "render": render}
    try:
        modes[options.mode](options)
    except UserError as error:
        print(error, file=sys.stderr)
        sys.exit(USER_ERROR_EXIT_CODE)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=["rate", "curve", "accuracy", "aborts", "render"], required=True)
    parser.add_argument("--links", nargs="+", default=LINKS)
    parser.add_argument("--candidates", nargs="+", default=CANDIDATES)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--windows", type=int, default=3, help="rate: windows of each candidate")
    parser.add_argument("--steps", type=int, help="rate: most steps of a window; aborts: steps of a run")
    parser.add_argument("--window-s", type=float, default=3.0, help="rate: seconds that a window should take at most")
    parser.add_argument("--warm-up", type=int, default=4, help="rate: steps before the first window")
    parser.add_argument("--at-once", type=int, default=24, help="rate: candidates that are alive at once")
    parser.add_argument("--no-loopback", action="store_true", help="rate: leave out the same candidate over loopback")
    parser.add_argument("--epochs", type=float, default=3.0, help="curve: at least so many, on until the accuracy")
    parser.add_argument("--max-epochs", type=float, default=8.0, help="curve, accuracy: and at most so many")
    parser.add_argument(
        "--every", type=int, default=40, help="curve, accuracy: steps between evaluations, rounded up to whole periods"
    )
    parser.add_argument("--schedule", choices=["constant", "cosine"], default="constant", help="curve: learning rate")
    parser.add_argument("--target", type=float, help="curve: accuracy to aim at; without it, what plain DDP's set")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--runs", type=int, default=50, help="aborts: runs of each candidate")
    parser.add_argument("--print", action="store_true", help="render: to the terminal")
    return parser.parse_args()


def rate(options: argparse.Namespace) -> None:
    """Measure steps/s: candidates, plain DDP in each batch of them, are alive at once and get windows in turn."""
    terms = Terms(tables.BATCH, options.lr, options.momentum)
    for link in options.links:
        check_link(parse_link(link))
    others = [candidate for candidate in options.candidates if candidate != "ddp"]
    batches = [others[i : i + options.at_once] for i in range(0, len(others), options.at_once)] or [[]]
    for link, batch in itertools.product(options.links, batches):
        places = [link] if options.no_loopback else [tables.LOOPBACK, link]
        with contextlib.ExitStack() as stack:
            network = stack.enter_context(ShapedNetwork(2, parse_link(link)))
            pairs: dict[tuple[str, str], Pair] = {}
            for candidate, place in itertools.product(["ddp", *batch], places):
                pair = stack.enter_context(Pair(candidate, terms, network if place == link else None))
                pair.wait_until_ready()  # one after another: together their models would fill a slow link for minutes
                pairs[candidate, place] = pair
            _take_turns(pairs, link, options)


def _take_turns(pairs: dict[tuple[str, str], Pair], link: str, options: argparse.Namespace) -> None:
    steps = options.steps or MOST_STEPS
    found: dict[tuple[str, str], list[Window]] = {contender: [] for contender in pairs}
    failed: dict[tuple[str, str], str] = {}
    lengths: dict[tuple[str, str], int] = {}
    for turn, contender in interleave(list(pairs), options.windows + 1):
        if contender in failed:
            continue
        try:
            window = pairs[contender].run(lengths[contender] if turn else _warm_up(contender[0], options.warm_up))
        except CandidateFailed as failure:
            failed[contender] = str(failure)
            pairs[contender].close()
            print(f"{contender[0]} on {contender[1]} failed: {_last_line(failure)}", flush=True)
            continue
        if not turn:
            affordable = max(2, round(options.window_s * window.steps / window.seconds))
            lengths[contender] = whole_periods(contender[0], min(steps, affordable))
        else:
            found[contender].append(window)
            print(f"{contender[0]} on {contender[1]}: {window.steps / window.seconds:.2f} steps/s", flush=True)
    for (candidate, place), windows in found.items():
        result: dict[str, Any] = {
            "kind": "rate",
            "link": link,
            "place": place,
            "candidate": candidate,
            "parameters": pairs[candidate, place].parameters,
            "windows": [asdict(window) for window in windows],
            "ddp_windows": [asdict(window) for window in found["ddp", place]],
            "loopback_windows": [asdict(window) for window in found.get((candidate, tables.LOOPBACK), [])],
            "failed": failed.get((candidate, place)),
            "command": command_line(_MODULE),
        }
        append_result(NAME, result)


def whole_periods(candidate: str, steps: int) -> int:
    """Return the steps, rounded up to a multiple of a strategy's period: a window holds its share of the traffic."""
    period = tables.period(candidate)
    return -(-steps // period) * period


def _warm_up(candidate: str, steps: int) -> int:
    """Return the steps before the first window, after which no mean is on its way: others run between windows."""
    return whole_periods(candidate, steps) + tables.overlap(candidate)


def curve(options: argparse.Namespace) -> None:
    """Learn accuracy by step over loopback: for synchronous methods the link does not change it.

    Plain DDP comes first: its curves of all seeds set the accuracy that the others aim at.
    """
    least, most = (round(epochs * STEPS_PER_EPOCH) // 8 * 8 for epochs in (options.epochs, options.max_epochs))
    cosine = options.schedule == "cosine"
    for candidate, seed in itertools.product(sorted(options.candidates, key=lambda c: c != "ddp"), options.seeds):
        terms = Terms(tables.BATCH, options.lr, options.momentum, seed, least if cosine else 0)
        aim = options.target or tables.target(read_results(NAME))
        target = None if cosine or candidate == "ddp" else aim
        result = {"kind": "curve", "link": tables.LOOPBACK, "schedule": options.schedule, "epochs_step": least}
        goal = (least, least if cosine or target is None else most, target)
        _train(candidate, terms, None, (result, goal), options)


def accuracy(options: argparse.Namespace) -> None:
    """Measure seconds to the accuracy over loopback and each link in turn, where it is under 10 minutes.

    Trained is the curve's trajectory again: the first evaluation is where the curve reached the accuracy.
    """
    results = read_results(NAME)
    target = tables.target(results)
    if target is None:
        raise UserError(TOO_FEW_POINTS)
    most = round(options.max_epochs * STEPS_PER_EPOCH) // 8 * 8
    with contextlib.ExitStack() as stack:
        networks = {link: stack.enter_context(ShapedNetwork(2, parse_link(link))) for link in options.links}
        places = [tables.LOOPBACK, *options.links]
        for seed, candidate, place in itertools.product(options.seeds, options.candidates, places):
            expected = tables.derived_seconds(results, candidate, place, seed, target)
            if expected is None or expected > MEASURED_LIMIT_S:
                why = "the steps or the rate are not known" if expected is None else f"would take {expected:.0f} s"
                print(f"{candidate} on {place}, seed {seed}: not measured, {why}", flush=True)
                continue
            terms = Terms(tables.BATCH, options.lr, options.momentum, seed)
            result = {"kind": "accuracy", "link": place}
            first = tables.steps_needed(results, candidate, seed, target) or 0
            _train(candidate, terms, networks.get(place), (result, (first, most, target)), options)


def _train(
    candidate: str,
    terms: Terms,
    network: ShapedNetwork | None,
    task: tuple[dict[str, Any], tuple[int, int, float | None]],
    options: argparse.Namespace,
) -> None:
    """Train and evaluate in turn; seconds are those of training, and of agreeing on what is evaluated.

    Appends the result, also of a failure.
    """
    result, (least, most, target) = task
    every = whole_periods(candidate, options.every)  # replicas agree there: what is evaluated needs no other exchange
    points: list[tuple[int, float, float]] = []
    failed = None
    with Pair(candidate, terms, network) as pair:
        try:
            first = least if result["kind"] == "accuracy" else 0
            for step, steps in _stops(least, most, every, first):
                seconds = (points[-1][1] if points else 0.0) + pair.run(steps).seconds
                reached, agreeing_s = pair.evaluate()
                points.append((step, seconds + agreeing_s, reached))
                print(f"{candidate} on {result['link']}, seed {terms.seed}: {points[-1]}", flush=True)
                if step >= least and target is not None and tables.steps_to(candidate, points, target):
                    break
        except CandidateFailed as failure:
            failed = str(failure)
            print(f"{candidate} on {result['link']} failed: {_last_line(failure)}", flush=True)
    found = {"candidate": candidate, "seed": terms.seed, "points": points, "failed": failed, "target": target}
    append_result(NAME, {**result, **found, "lr": terms.lr, "command": command_line(_MODULE)})


def _stops(least: int, most: int, every: int, first: int) -> Iterator[tuple[int, int]]:
    """Yield (step, steps since the last stop): every so many steps from `first` on, at `least` and at `most`."""
    done = 0
    for step in sorted({*range(every, most, every), *([least] if least else []), most}):
        if step >= first:
            yield step, step - done
            done = step


def aborts(options: argparse.Namespace) -> None:
    """Count runs that end in an abort, an exception or a hang; short runs over loopback."""
    steps = options.steps or 30
    for candidate in options.candidates:
        failures = []
        for run in range(options.runs):
            with Pair(candidate, Terms(tables.BATCH, options.lr, options.momentum, run), None) as pair:
                try:
                    pair.run(steps)
                except CandidateFailed as failure:
                    failures.append(_last_line(failure))
        result = {"kind": "aborts", "candidate": candidate, "runs": options.runs, "steps": steps, "failures": failures}
        append_result(NAME, result | {"command": command_line(_MODULE)})
        print(f"{candidate}: {len(failures)} of {options.runs} runs failed {sorted(set(failures))[:2]}", flush=True)


def _last_line(failure: CandidateFailed) -> str:
    return (str(failure).strip().splitlines() or ["no reason given"])[-1]


def render(options: argparse.Namespace) -> None:
    """Write the tables."""
    tables.render(read_results(NAME), options.print)


_MODULE = "benchmarks.slow_link"

if __name__ == "__main__":
    main()
