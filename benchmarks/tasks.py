"""What `echelon train DATA` reaches with a task's own model and settings, and how long it takes.

python -m benchmarks.tasks [--only ratings] [--seeds 3] [--workers 2]

Data are the archives beside the checkout. `plain` is a single process of ours without the product's loop: the same
model, arrays, optimizer and number of epochs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks._common import REPOSITORY, command_line, environment_line, markdown_table, update_section
from benchmarks._gated import Contender, take_turns
from benchmarks._tasks_hand import bias_rmse, plain_windows, product_windows

ARCHIVES = REPOSITORY.parent / "shared" / "data"
ECHELON = [sys.executable, "-m", "echelon"]
DEADLINE_S = 3 * 3600.0
SECTION = "Tasks: what a command reaches"


@dataclass(frozen=True)
class Candidate:
    """A command.

    Attributes:
        arguments: of `echelon train`.
        metric: of the summary that is told.
        unpack: puts the data in a folder, where the command runs.
        by_hand: whether a plain loop of ours can train it too.
        window_steps: steps of a window in which rates are measured.
    """

    name: str
    arguments: tuple[str, ...]
    metric: str
    unpack: Callable[[Path], None]
    by_hand: bool = True
    window_steps: int = 100


def _unpacked(archive: str) -> Callable[[Path], None]:
    def unpack(folder: Path) -> None:
        """Unpack an archive."""
        path = ARCHIVES / archive
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as file:
                file.extractall(folder)
        elif path.suffix == ".gz":
            with tarfile.open(path) as file:
                file.extractall(folder, filter="data")
        else:
            shutil.copy(path, folder)

    return unpack


def _without_a_speaker(speaker: str) -> Callable[[Path], None]:
    def unpack(folder: Path) -> None:
        """Make the sounds of one speaker the test set, and train on the others'."""
        _unpacked("speech-digits.tar.gz")(folder)
        for file in sorted((folder / "speech-digits").rglob("*.wav")):
            part = "test" if file.name.split("_")[1] == speaker else "train"
            place = folder / speaker / part / file.parent.name
            place.mkdir(parents=True, exist_ok=True)
            file.rename(place / file.name)

    return unpack


def _table(folder: Path) -> None:
    """Write a table of three numbers, and a fourth that is made of them with noise of standard deviation 2."""
    numbers = np.random.default_rng(0)
    a, b, c = numbers.normal(size=(3, 5000))
    y = 10 + 3 * a + 2 * np.sin(3 * b) * c + numbers.normal(size=5000) * 2
    rows = ["a,b,c,y", *(",".join(f"{value:.6f}" for value in row) for row in zip(a, b, c, y, strict=True))]
    (folder / "table.csv").write_text("\n".join(rows) + "\n")


SPEAKERS = ("george", "jackson", "lucas", "nicolas", "theo", "yweweler")
CANDIDATES = (
    Candidate(
        "text",
        ("banking77", "--input", "text", "--target", "category"),
        "top1",
        _unpacked("banking77.tar.gz"),
        window_steps=30,
    ),
    Candidate("sounds", ("speech-digits",), "top1", _unpacked("speech-digits.tar.gz"), window_steps=20),
    Candidate(
        "ratings",
        ("ml-latest-small/ratings.csv", "--task", "recommendation", "--input", "userId,movieId", "--target", "rating"),
        "rmse",
        _unpacked("movielens-small.zip"),
        window_steps=100,
    ),
    Candidate("table", ("table.csv", "--input", "a,b,c", "--target", "y"), "rmse", _table, window_steps=200),
    Candidate(
        "characters",
        ("tinyshakespeare.txt", "--task", "language-modelling"),
        "loss",
        _unpacked("tinyshakespeare.txt"),
        window_steps=20,
    ),
    Candidate(
        "translation",
        ("multi30k-en-de", "--task", "translation", "--input", "en", "--target", "de"),
        "chrf",
        _unpacked("multi30k-en-de.tar.gz"),
        window_steps=8,
    ),
    *(Candidate(f"speaker-{name}", (name,), "top1", _without_a_speaker(name), by_hand=False) for name in SPEAKERS),
)


@dataclass(frozen=True)
class Outcome:
    """What one run gave; seconds are the command's, from its start to its end."""

    value: float
    seconds: float


def run(candidate: Candidate, folder: Path, seed: int, workers: int) -> Outcome:
    """Train with the command line."""
    place = folder / "runs" / f"{candidate.name}-{seed}-{workers}"
    command = [*ECHELON, "train", *candidate.arguments, "--seed", str(seed), "--workers", str(workers)]
    began = time.perf_counter()
    subprocess.run(
        [*command, "--run", str(place)], cwd=folder, check=True, stdout=subprocess.DEVNULL, timeout=DEADLINE_S
    )
    seconds = time.perf_counter() - began
    summary = json.loads((place / "summary.json").read_text())
    metrics = summary["metrics"]
    value = metrics[candidate.metric] if candidate.metric in metrics else np.log(metrics["perplexity"])
    return Outcome(float(value), seconds)


def by_hand(candidate: Candidate, folder: Path, seed: int) -> float:
    """Train with a plain loop what the command describes, on its split of the data, and return the metric."""
    words = [str(folder), candidate.metric, str(seed), *candidate.arguments]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks._tasks_hand", *words],
        cwd=REPOSITORY, check=True, stdout=subprocess.PIPE, text=True, timeout=DEADLINE_S,
    )  # fmt: skip
    return float(json.loads(done.stdout.splitlines()[-1]))


def rates(candidate: Candidate, windows: int) -> str:
    """Return the ratio of the product's samples per second to the plain loop's, one process each, in turns.

    Ratios are of neighbouring windows of the same batches' number; intervals are of their median, by bootstrap. On a
    busy machine those of processor seconds say more: who waits for a core takes no processor.
    """
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        candidate.unpack(folder)
        contenders = {
            "plain": Contender(partial(plain_windows, folder, candidate.arguments), ranks=1),
            "product": Contender(partial(product_windows, folder, candidate.arguments), ranks=1),
        }
        results = take_turns(contenders, windows, candidate.window_steps)
        ratios = np.array(results["plain"]) / np.array(results["product"])  # (windows, 2)
        drawn = np.random.default_rng(0).choice(ratios, (2000, len(ratios)))
        median, (low, high) = np.median(ratios, 0), np.quantile(np.median(drawn, 1), (0.05, 0.95), 0)
        shown = [f"{m:.3f} ({a:.3f} to {b:.3f})" for m, a, b in zip(median, low, high, strict=True)]
        samples = candidate.window_steps / np.median([seconds for seconds, _ in results["plain"]])
        load = " ".join(f"{part:.1f}" for part in os.getloadavg())
        return f"{shown[0]}; by processor seconds {shown[1]}; {samples:.1f} plain steps a second, load {load}"


def measure(candidate: Candidate, seeds: Sequence[int], workers: int, hand: bool) -> list[object]:
    """Return a row of the table."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        candidate.unpack(folder)
        runs = []
        for seed in seeds:
            runs.append(run(candidate, folder, seed, workers))
            print(candidate.name, f"seed {seed}", runs[-1], file=sys.stderr, flush=True)
        plain: list[float] = []
        if hand and candidate.by_hand:
            with ThreadPoolExecutor(workers) as pool:  # as many loops at a time as a run has workers
                plain = list(pool.map(partial(by_hand, candidate, folder), seeds))
        note = ""
        if candidate.name == "ratings":
            note = f"biases alone {_listed([bias_rmse(candidate.arguments, seed, folder) for seed in seeds])}"
    return [
        candidate.name, f"`echelon train {' '.join(candidate.arguments)}`", candidate.metric,
        _listed([each.value for each in runs]), f"{statistics.median(each.seconds for each in runs):.0f} s",
        _listed(plain), rates(candidate, 9) if plain else "", note,
    ]  # fmt: skip


def _listed(values: Sequence[float]) -> str:
    if not values:
        return ""
    mean = statistics.fmean(values)
    return f"{mean:.4f} ({', '.join(f'{value:.4f}' for value in values)})" if len(values) > 1 else f"{mean:.4f}"


def main() -> None:
    """Measure, print and write the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names, joined by commas")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--no-hand", action="store_true", help="leave the plain loops out")
    parser.add_argument("--rates", type=int, default=0, metavar="N", help="only the rates, by N windows each")
    parser.add_argument("--print", action="store_true", help="leave RESULTS.md as it is")
    options = parser.parse_args()
    names = set(filter(None, options.only.split(",")))
    rows = []
    for candidate in CANDIDATES:
        if not names or candidate.name in names:
            if options.rates:
                print(candidate.name, rates(candidate, options.rates), sep=" | ", flush=True)
                continue
            seeds = range(options.first, options.first + options.seeds)
            rows.append(measure(candidate, seeds, options.workers, not options.no_hand))
            print(*rows[-1], sep=" | ", flush=True)
    header = ["data", "command", "metric", "mean (each seed)", "median time", "plain loop", "rate of plain", "note"]
    if rows and not options.print:
        update_section(
            SECTION,
            f"{options.workers} workers of one thread each; one worker against the plain loop.\n\n"
            + markdown_table(header, rows) + "\n\n" + environment_line(command_line("benchmarks.tasks")),
        )  # fmt: skip


if __name__ == "__main__":
    main()
