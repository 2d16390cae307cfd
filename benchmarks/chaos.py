"""Chaos: trials that each kill (-9) a random role of a run with a parameter server at a random moment.

    python -m benchmarks.chaos [--trials 100] [--at-once 2] [--seconds 300] [--mode async] [--summary]

Each trial trains digits with 2 workers and 2 servers, every second one with standbys (replicas=1). It must finish; in
async mode each batch of each epoch must be counted exactly once, by the scheduler's journal and by every key of the
last checkpoint; top-1 must be at least 0.95. Moments are drawn over the whole run, its start and its end included.
Results are appended to `benchmarks/results/chaos.jsonl`, and trials that are there are not repeated, so that the work
may be cut into pieces (`--seconds`); remove the file to begin anew. `--summary` writes the table. Exit code 1 when a
trial broke a promise.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict

from benchmarks import _common as common
from benchmarks._chaos_trial import WANTED_TOP1, Setting, Trainer, Trial, run_trial

TITLE = "Chaos: a role killed at a random moment"


def settings_for(seed: int, mode: str, epochs: int) -> Setting:
    """Every second trial has standbys."""
    return Setting(mode=mode, replicas=seed % 2, epochs=epochs)


def known(mode: str) -> list[Trial]:
    """Return the trials that were done before."""
    names = list(Trial.__dataclass_fields__)
    found = [Trial(**{n: r[n] for n in names}) for r in common.read_results("chaos")]
    return [t for t in found if t.mode == mode]


def run_trials(args: argparse.Namespace) -> None:
    """Do the trials that are missing, `--at-once` of them at a time, until the time is up."""
    done = {t.seed for t in known(args.mode)} if not args.victim else set()
    seeds = deque(seed for seed in range(args.first, args.first + args.trials) if seed not in done)
    ends = time.monotonic() + args.seconds
    with ThreadPoolExecutor(args.at_once) as pool:
        for each in [pool.submit(_some_trials, args, seeds, ends) for _ in range(args.at_once)]:
            each.result()


def _some_trials(args: argparse.Namespace, seeds: deque[int], ends: float) -> None:
    own = Trainer()
    try:
        while seeds and time.monotonic() < ends:
            seed = seeds.popleft()
            try:
                trial = run_trial(own, settings_for(seed, args.mode, args.epochs), seed, args.victim)
            except (RuntimeError, BrokenPipeError) as error:
                print(error, flush=True)
                own.close()
                own = Trainer()
                continue
            print(json.dumps(asdict(trial)), flush=True)
            if not trial.victim and trial.kept:
                continue  # nobody was there to kill any more: this was no trial
            if not args.victim:
                common.append_result("chaos", asdict(trial))
            if trial.status == "hung":
                own.close()
                own = Trainer()
    finally:
        own.close()


def table(trials: list[Trial]) -> str:
    """Write the trials by role and standbys."""
    rows = []
    for replicas in (0, 1):
        for role in ("scheduler", "server", "standby", "worker"):
            some = [t for t in trials if t.replicas == replicas and t.victim.startswith(role)]
            if some:
                pauses = [t.recovery_s for t in some if t.recovery_s == t.recovery_s]
                rows.append([role, replicas, len(some), sum(t.status == "completed" for t in some),
                             sum(t.counted_once for t in some), sum(t.lost for t in some),
                             f"{min(t.top1 for t in some):.3f}",
                             f"{common.median(pauses):.2f} ({max(pauses):.2f})" if pauses else ""])  # fmt: skip
    head = ["killed", "standbys", "trials", "finished", "each batch once", "updates lost", "lowest top-1",
            "kill to next update, s: median (longest)"]  # fmt: skip
    return common.markdown_table(head, rows)


def summarise(mode: str) -> str:
    """Write the sentence and the table of all trials of a mode."""
    trials = known(mode)
    pauses = [t.recovery_s for t in trials if t.recovery_s == t.recovery_s]
    broken = [t.seed for t in trials if not t.kept]
    said = (
        f"`mode={mode}`: {len(trials)} trials, {sum(t.status == 'completed' for t in trials)} finished, "
        f"{sum(t.counted_once for t in trials)} counted each batch of each epoch exactly once, "
        f"{sum(t.top1 >= WANTED_TOP1 for t in trials)} reached top-1 {WANTED_TOP1}; kill to the survivors' next update "
        f"{common.median(pauses):.2f} s in the median; promises broken in {len(broken)}"
        f"{f' (seeds {broken})' if broken else ''}."
    )
    return f"{said}\n\n{table(trials)}"


def main() -> int:
    """Run the trials, or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="seed of the first trial")
    parser.add_argument("--at-once", type=int, default=1, help="trials beside each other")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no trial after so long")
    parser.add_argument("--mode", default="async")
    parser.add_argument("--epochs", type=int, default=Setting.epochs)
    roles = ["scheduler", *(f"{role}{i}" for role in ("server", "standby", "worker") for i in (0, 1))]
    parser.add_argument("--victim", default="", choices=["", *roles], help="kill this one; results are not kept")
    parser.add_argument("--summary", action="store_true", help="write the table of all results")
    args = parser.parse_args()
    if args.summary:
        said = "\n\n".join(summarise(mode) for mode in ("async", "sync") if known(mode))
        how = (
            "Each trial trains digits (2 workers, 2 servers, every second one with standbys, snapshots every 20 "
            "updates) and kills a random role with -9 at a random moment, start and end included. A batch is counted "
            "once when the scheduler's journal has it once and every key of the last checkpoint has as many updates "
            "as there are batches. The longest pause after the kill counts; the machine was shared."
        )
        common.update_section(TITLE, f"{common.environment_line('python -m benchmarks.chaos')}\n\n{how}\n\n{said}")
        print(said)
        return 0
    run_trials(args)
    return 0 if all(t.kept for t in known(args.mode)) else 1


if __name__ == "__main__":
    sys.exit(main())
