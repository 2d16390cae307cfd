"""Whole runs of `echelon train` over slow links beside the same over loopback: seconds from the first step to the end.

python -m benchmarks.slow_runs [--data images cifar10 ...] [--batches 128 256] [--links 100mbit 10mbit] [--seeds 0 1 2]
python -m benchmarks.slow_runs --render      # the tables of all results so far, into RESULTS.md

Two workers of one thread each. An image set is made from a seed (`benchmarks.accuracy`), with its SE-ResNet; CIFAR-10
as a folder of JPEG files, banking77 and speech digits are unpacked, with models that the product has for them. For each
seed the ways take turns over loopback and the links; all-reduce over loopback is what accuracies are compared with,
seed by seed. Needs root, for links are shaped in network namespaces.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks._common import (
    REPOSITORY,
    append_result,
    command_line,
    environment_line,
    markdown_table,
    read_results,
    update_section,
)
from benchmarks.accuracy import interval, make_images
from echelon.reporting.report import summarise
from echelon.reporting.report.records import load_run

NAME, TITLE, LOOPBACK = "slow_runs", "Slow links: whole runs", "loopback"
ARCHIVES = REPOSITORY.parent / "shared" / "data"
BASE = "allreduce;none"
WAYS = ("local(4);sign", "local(8, overlap=2);sign")
WAYS_OF_ADAM = ("diloco(8);int8", "local(8, overlap=2, outer_lr=1.41);sign")
DEADLINE_S = 1800.0


@dataclass(frozen=True)
class Work:
    """Data and what follows `echelon train DATA`.

    Attributes:
        archive: file in the folder of archives; empty: images are made.
        epochs: of batches of 128; twice as many of 256, so that the steps are as many.
        ways: that are recommended for its optimizer.
    """

    archive: str
    folder: str
    epochs: int
    options: tuple[str, ...]
    ways: tuple[str, ...] = WAYS


WORKS = {
    "images": Work(
        "", "images", 4, ("--model", "benchmarks.accuracy:se_resnet", "--trust", "--augment", "none"),
    ),
    "cifar10": Work("cifar10-imagefolder.tar.gz", "cifar10", 1, ("--model", "small_cnn")),
    "banking77": Work(
        "banking77.tar.gz", "banking77", 4, ("--input", "text", "--target", "category"), WAYS_OF_ADAM
    ),
    "speech-digits": Work("speech-digits.tar.gz", "speech-digits", 12, ()),
}  # fmt: skip


def prepare(name: str, folder: Path) -> Path:
    """Make or unpack the data; returns where they are."""
    work = WORKS[name]
    if not work.archive:
        make_images(folder / work.folder, seed=1)
    else:
        shutil.unpack_archive(ARCHIVES / work.archive, folder, filter="data")
    return folder / work.folder


def train(data: Path, name: str, batch: int, way: str, link: str, seed: int, run: Path) -> dict[str, Any]:
    """Train once; return the seconds from the first step to the end, those of pauses, and the test's metric.

    Raises:
        CalledProcessError: the run failed.
        ValueError: it recorded no step.
    """
    work = WORKS[name]
    sync, compression = way.split(";")
    command = [
        sys.executable, "-m", "echelon", "train", str(data), *work.options, "--epochs", str(work.epochs * batch // 128),
        "--batch-size", str(batch), "--workers", "2", "--threads", "1", "--device", "cpu", "--seed", str(seed),
        "--sync", sync, "--compression", compression, "--run", str(run),
        *(() if link == LOOPBACK else ("--link", link)),
    ]  # fmt: skip
    path = {**os.environ, "PYTHONPATH": os.pathsep.join([str(REPOSITORY), os.environ.get("PYTHONPATH", "")])}
    subprocess.run(command, check=True, timeout=DEADLINE_S, stdout=subprocess.DEVNULL, env=path)
    found = summarise(load_run(run))
    if found.whole is None:
        raise ValueError(f"{run} has no step")
    top1 = json.loads((run / "summary.json").read_text())["metrics"]["top1"]
    return {
        "seconds": found.whole.seconds, "steps_s": found.whole.steps_s, "pauses": dict(found.whole.pauses),
        "steps": found.steps, "top1": 100 * top1,
    }  # fmt: skip


def measure(options: argparse.Namespace, name: str, batch: int, folder: Path) -> None:
    """Do the runs of one data set and batch, and append their results."""
    data = prepare(name, folder)
    for seed in options.seeds:
        ways = options.ways or WORKS[name].ways
        turns = [(BASE, LOOPBACK), *((way, link) for way in ways for link in (LOOPBACK, *options.links))]
        for way, link in turns if seed % 2 == 0 else reversed(turns):
            run = folder / "run"
            found = train(data, name, batch, way, link, seed, run)
            shutil.rmtree(run)
            about = {"data": name, "batch": batch, "way": way, "link": link, "seed": seed}
            append_result(NAME, {**about, **found, "command": command_line("benchmarks.slow_runs")})
            print(about, f"{found['seconds']:.1f} s", f"{found['top1']:.2f}%", flush=True)


def render() -> None:
    """Write the tables of the newest result of each run."""
    results = [*{tuple(r[k] for k in ("data", "batch", "way", "link", "seed")): r for r in read_results(NAME)}.values()]
    if not results:
        raise SystemExit("nothing was measured")
    links = [link for link in ("100mbit", "10mbit") if any(r["link"] == link for r in results)]
    rows = []
    for name, batch, way in dict.fromkeys((r["data"], r["batch"], r["way"]) for r in results):
        own = [r for r in results if (r["data"], r["batch"]) == (name, batch)]
        rows.append(_row(name, batch, way, own, links))
    header = ["data", "batch", "steps", "way", "loopback, s", *(f"x at {link}" for link in links)]
    table = markdown_table([*header, "top-1", "difference to all-reduce, points (90%)", "pauses at the last"], rows)
    last = results[-1]
    update_section(TITLE, f"{environment_line(last['command'], last['environment'])}\n\n{ABOUT}\n\n{table}")


ABOUT = (
    "Seconds of `echelon train` from the first step to the end, checkpoints and evaluations counted. A link's column: "
    "how many times the seconds of the same way over loopback, paired by seed, median (lowest to highest). Accuracy: "
    "runs over loopback, paired by seed with all-reduce. The last column: share of pauses at the slowest link."
)


def _row(name: str, batch: int, way: str, own: Sequence[dict[str, Any]], links: Sequence[str]) -> list[object]:
    at = {link: {r["seed"]: r for r in own if (r["way"], r["link"]) == (way, link)} for link in (LOOPBACK, *links)}
    base = {r["seed"]: r for r in own if (r["way"], r["link"]) == (BASE, LOOPBACK)}
    times = []
    for link in links:
        ratios = [r["seconds"] / at[LOOPBACK][seed]["seconds"] for seed, r in at[link].items() if seed in at[LOOPBACK]]
        bounds = f" ({min(ratios):.2f} to {max(ratios):.2f})" if len(ratios) > 1 else ""
        times.append(f"{statistics.median(ratios):.2f}{bounds}" if ratios else "")
    here = at[LOOPBACK]
    off = [r["top1"] - base[seed]["top1"] for seed, r in here.items() if seed in base]
    accuracy = _difference(off) if off and way != BASE else ""
    slowest = at[links[-1]].values() if links else ()
    return [
        name, batch, f"{statistics.median(r['steps'] for r in here.values()):.0f}", f"`{way}`",
        f"{statistics.median(r['seconds'] for r in here.values()):.1f}", *times,
        f"{statistics.mean(r['top1'] for r in here.values()):.2f}", accuracy, _pauses(slowest),
    ]  # fmt: skip


def _difference(off: list[float]) -> str:
    if len(off) < 2:
        return f"{off[0]:+.2f}, 1 seed"
    mean, low, high = interval(off)
    return f"{mean:+.2f} ({low:+.2f} to {high:+.2f}), {len(off)} seeds"


def _pauses(runs: Iterable[dict[str, Any]]) -> str:
    shares = [sum(r["pauses"].values()) / r["seconds"] for r in runs]
    return f"{statistics.median(shares):.1%}" if shares else ""


def main() -> None:
    """Measure, or only render."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", choices=list(WORKS), default=list(WORKS))
    parser.add_argument("--batches", type=int, nargs="+", default=[128, 256])
    parser.add_argument("--links", nargs="*", default=["100mbit", "10mbit"])
    parser.add_argument(
        "--ways", nargs="+", metavar="SYNC;COMPRESSION", help="left out: those recommended for the data"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--render", action="store_true")
    options = parser.parse_args()
    if options.render:
        render()
        return
    for name in options.data:
        for batch in options.batches:
            with tempfile.TemporaryDirectory() as folder:
                measure(options, name, batch, Path(folder))


if __name__ == "__main__":
    main()
