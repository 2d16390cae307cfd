"""How long `echelon train` stands still for a checkpoint and for an evaluation over a slow link, beside loopback.

A folder of images made with a seed, a small CNN with BatchNorm (0.8 M parameters), 2 workers x 1 thread. Each way of
agreeing trains over loopback and over the link in turn; the pauses are those in the run's record. Needs root. With
`--own-disks` the run over the link is one of two machines with a folder each, which rank 0 sees one of.

    python -m benchmarks.standstill [--own-disks] [--link 10mbit] [--rounds 2] [--ways 'allreduce;topk(0.01)' ...]
    python -m benchmarks.standstill --render     # the table of all results so far
"""

from __future__ import annotations

import argparse
import os
import random
import secrets
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from benchmarks._common import (
    REPOSITORY,
    append_result,
    command_line,
    environment_line,
    interleave,
    markdown_table,
    read_results,
    update_section,
)
from echelon.launch.link import ShapedNetwork, parse_link
from echelon.records.file import read_records
from echelon.records.kinds import End, LinkTraffic, Pause, Steps

NAME, TITLE = "standstill", "Standstill for checkpoints and evaluations"
LOOPBACK, OWN_DISKS = "loopback", "own disks"
WAYS = ["allreduce;topk(0.01)", "allreduce;sign", "local(8, overlap=2);sign", "diloco(20);int8", "ps(mode=sync);none"]
PAUSES = ("checkpoint", "evaluation")
CLASSES, TRAINING, TEST, SIDE = 10, 240, 100, 28
DEADLINE_S = 600.0


def small_bn_cnn(channels: int, classes: int) -> nn.Module:
    """Return two convolutions with BatchNorm and two layers: cheap to compute, 3.3 MB to send."""
    convolutions = [
        nn.Conv2d(channels, 32, 3, 2, 1, bias=False), nn.BatchNorm2d(32), nn.ReLU(),
        nn.Conv2d(32, 64, 3, 2, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(),
    ]  # fmt: skip
    return nn.Sequential(
        *convolutions, nn.Flatten(), nn.Linear(64 * (SIDE // 4) ** 2, 256), nn.ReLU(), nn.Linear(256, classes)
    )


def make_images(folder: Path) -> None:
    """Write a folder of noisy images of 10 classes, for training and test; the same ones each time."""
    from PIL import Image

    draws = np.random.default_rng(0)
    prototypes = draws.integers(0, 255, (CLASSES, 7, 7, 3))
    for split, count in (("train", TRAINING), ("test", TEST)):
        for label in range(CLASSES):
            place = folder / split / f"class{label}"
            place.mkdir(parents=True)
            for i in range(count):
                pixels = np.kron(prototypes[label], np.ones((4, 4, 1))) + draws.normal(0, 90, (SIDE, SIDE, 3))
                Image.fromarray(pixels.clip(0, 255).astype("uint8")).save(place / f"{i}.png")


def train(data: Path, folder: Path, way: str, place: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train once; returns the seconds of each pause, and what went over the link."""
    sync, _, compression = way.partition(";")
    command = [
        sys.executable, "-m", "echelon", "train", str(data), "--model", "benchmarks.standstill:small_bn_cnn",
        "--workers", "2", "--epochs", str(options.epochs), "--batch-size", "128", "--sync", sync,
        "--compression", compression, "--checkpoint-every", str(options.every), "--run", str(folder),
    ]  # fmt: skip
    if place == OWN_DISKS:
        sent_bytes = run_on_machines(command, folder, options.link)
    else:
        run_all([command if place == LOOPBACK else [*command, "--link", place]])
        sent_bytes = [host.sent_bytes for link in read_records(folder, LinkTraffic) for host in link.hosts]
    pauses = read_records(folder, Pause)
    windows, ends = read_records(folder, Steps), read_records(folder, End)
    return {
        "pauses": {name: [(p.step, round(p.seconds, 4)) for p in pauses if p.name == name] for name in PAUSES},
        "steps": sum(window.count for window in windows),
        "steps_s": sum(window.seconds for window in windows),
        "other_bytes": sum(w.other_wire_bytes for w in windows) + sum(e.other_wire_bytes or 0 for e in ends),
        "sent_bytes": sent_bytes,
    }


def run_on_machines(command: Sequence[str], folder: Path, link: str) -> list[int]:
    """Run a command on two machines, which are network namespaces here; returns the bytes that each sent.

    Args:
        folder: of the first machine; the other one has another.
    """
    secret = {**os.environ, "ECHELON_RUN_SECRET": secrets.token_hex(32)}
    with ShapedNetwork(2, parse_link(link)) as network:
        where = ["--nodes", "2", "--rendezvous", f"{network.addresses[0]}:29400", "--workers", "1", "--threads", "1"]
        folders = [str(folder), f"{folder}-elsewhere"]
        run_all(
            [[*network.command_prefix(i), *command, *where, "--run", folders[i], "--device", "cpu"] for i in range(2)],
            secret,
        )
        return [network.counters(i).sent_bytes for i in range(2)]


def run_all(commands: Sequence[Sequence[str]], environment: Mapping[str, str] | None = None) -> None:
    """Run commands beside each other.

    Raises:
        RuntimeError: one fails, or takes too long.
    """
    started = [
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=REPOSITORY, env=environment
        )
        for command in commands
    ]
    try:
        for command, process in zip(commands, started, strict=True):
            output, _ = process.communicate(timeout=DEADLINE_S)
            if process.returncode:
                raise RuntimeError(f"{' '.join(command)} failed: {output.strip().splitlines()[-1:]}")
    finally:
        for process in started:
            process.kill()
            process.wait()


def measure(options: argparse.Namespace) -> None:
    """Measure each way over loopback and over the link, in turn."""
    with tempfile.TemporaryDirectory() as temporary:
        data = Path(temporary) / "images"
        make_images(data)
        slow = OWN_DISKS if options.own_disks else options.link
        contenders = [(way, place) for way in options.ways for place in (LOOPBACK, slow)]
        for turn, (way, place) in interleave(contenders, options.rounds):
            found = train(data, Path(temporary) / f"run-{turn}-{contenders.index((way, place))}", way, place, options)
            about = {"way": way, "place": place, "link": options.link, "slow": slow}
            about["command"] = command_line("benchmarks.standstill")
            append_result(NAME, {**about, **found})
            print(way, place, found, flush=True)


def render(options: argparse.Namespace) -> None:
    """Write the table of the results of one link."""
    slow = OWN_DISKS if options.own_disks else options.link
    results = [r for r in read_results(NAME) if r["link"] == options.link and r.get("slow", r["link"]) == slow]
    if not results:
        raise SystemExit("nothing was measured on this link")
    rows = []
    for way in dict.fromkeys(result["way"] for result in results):
        own = [result for result in results if result["way"] == way]
        for name in PAUSES:
            at = {place: _pauses(own, name, place) for place in (LOOPBACK, slow)}
            rows.append([way, name, *(_seconds(values) for values in at.values()), _ratio(*at.values())])
    header = [
        "way",
        "pause",
        "loopback: median s (n)",
        f"{options.link}{', own disks' if options.own_disks else ''}: median s (n)",
        "ratio of medians (90% interval)",
    ]
    last = results[-1]
    body = f"{markdown_table(header, rows)}\n\n{environment_line(last['command'], last['environment'])}"
    title = f"{TITLE}, each machine with its own disk" if options.own_disks else TITLE
    update_section(title, f"Seconds in which all ranks wait, from the record; interval by bootstrap.\n\n{body}")


def _pauses(results: Sequence[dict[str, Any]], name: str, place: str) -> list[float]:
    return [seconds for result in results if result["place"] == place for _, seconds in result["pauses"][name]]


def _seconds(values: Sequence[float]) -> str:
    return f"{statistics.median(values):.3f} ({len(values)})" if values else "-"


def _ratio(loopback: Sequence[float], link: Sequence[float]) -> str:
    if not loopback or not link:
        return "-"
    draws = random.Random(0)
    ratios = sorted(
        statistics.median(draws.choices(link, k=len(link)))
        / statistics.median(draws.choices(loopback, k=len(loopback)))
        for _ in range(2000)
    )
    return f"{statistics.median(link) / statistics.median(loopback):.2f} ({ratios[100]:.2f} to {ratios[1900]:.2f})"


def main() -> None:
    """Measure, or only render."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", default="10mbit")
    parser.add_argument("--own-disks", action="store_true")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--ways", nargs="+", default=WAYS)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--every", default="8", help="steps between checkpoints")
    parser.add_argument("--render", action="store_true")
    options = parser.parse_args()
    if not options.render:
        measure(options)
    render(options)


if __name__ == "__main__":
    main()
