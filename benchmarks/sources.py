"""Samples/s of tar shards against a folder of the same files, as a training process gets them.

Both are alive at once; windows of a second take turns, so that both see the same machine. The first window is warm-up.

    python -m benchmarks.sources [--loaders 0] [--windows 15]
"""

from __future__ import annotations

import argparse
import io
import tarfile
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from benchmarks._common import REPOSITORY, command_line, environment_line, markdown_table, median, update_section
from benchmarks.fetch_data import fetch
from benchmarks.input import Contender, Settings, links, ours

_PER_SHARD = 500
_WINDOW_S = 1.0
_SPEECH = REPOSITORY.parent / "shared" / "data" / "speech-digits.tar.gz"


@dataclass(frozen=True)
class Pair:
    """Two places of the same samples."""

    name: str
    folder: Path
    shards: Path


def write_shards(folder: Path, target: Path) -> Path:
    """Write the parts of a folder of classes as tar shards: for each sample its file and the name of its class."""
    for part in sorted(path for path in folder.iterdir() if path.is_dir()):
        files = sorted(path for path in part.rglob("*") if path.is_file())
        order = np.random.default_rng(0).permutation(len(files))
        for first in range(0, len(files), _PER_SHARD):
            place = target / part.name / f"{first // _PER_SHARD:05d}.tar"
            place.parent.mkdir(parents=True, exist_ok=True)
            with tarfile.open(place, "w", dereference=True) as tar:
                for i in order[first : first + _PER_SHARD]:
                    _add(tar, f"{i:07d}", files[i])
    return target


def _add(tar: tarfile.TarFile, key: str, file: Path) -> None:
    tar.add(file, f"{key}{file.suffix.lower().replace('.jpeg', '.jpg')}")
    label = file.parent.name.encode()
    member = tarfile.TarInfo(f"{key}.txt")
    member.size = len(label)
    tar.addfile(member, io.BytesIO(label))


def pairs(place: Path) -> list[Pair]:
    """Return images, which are decoded in each epoch, and sounds, whose features are kept."""
    images = links(fetch("imagenet-sample"), place / "images", 5)
    with tarfile.open(_SPEECH) as tar:
        tar.extractall(place, filter="data")
    folders = {"200 ImageNet JPEGs, 5 times": images, "speech digits": place / "speech-digits"}
    return [
        Pair(name, folder, write_shards(folder, place / f"shards-{folder.name}")) for name, folder in folders.items()
    ]


def measure(pair: Pair, loaders: int, windows: int) -> list[str]:
    """Return a row of the table."""
    alive = {path: ours(Settings(path, loaders, 50)) for path in (pair.folder, pair.shards)}
    rates: dict[Path, list[tuple[float, float]]] = {path: [] for path in alive}
    for window in range(windows + 1):
        for path in list(alive) if window % 2 else list(alive)[::-1]:
            measured = _window(alive[path], 100 * window)
            if window:
                rates[path].append(measured)
    for contender in alive.values():
        contender.close()
    ratios = np.array(rates[pair.shards]) / np.array(rates[pair.folder])
    drawn = np.median(np.random.default_rng(0).choice(ratios, (2000, len(ratios))), 1)
    low, high = np.quantile(drawn, (0.05, 0.95), 0)
    shown = [f"{median([clock for clock, _ in rates[path]]):,.0f}" for path in (pair.folder, pair.shards)]
    columns = zip(np.median(ratios, 0), low, high, strict=True)
    return [pair.name, *shown, *(f"{middle:.3f} ({least:.3f} to {most:.3f})" for middle, least, most in columns)]


def _window(contender: Contender, epoch: int) -> tuple[float, float]:
    """Return samples per second, by the clock and by this process's processor time, of epochs of a second together."""
    began, used, samples = time.perf_counter(), time.process_time(), 0
    while time.perf_counter() - began < _WINDOW_S:
        samples += sum(len(targets) for _, targets in contender.epoch(epoch))
        epoch += 1
    return samples / (time.perf_counter() - began), samples / (time.process_time() - used)


def main() -> None:
    """Measure, print and write the section."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loaders", type=int, default=0)
    parser.add_argument("--windows", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        rows = [measure(pair, options.loaders, options.windows) for pair in pairs(Path(place))]
    table = markdown_table(
        ("data", "folder, samples/s", "shards, samples/s", "shards / folder", "by processor seconds"), rows
    )
    print(table)
    where = environment_line(command_line("benchmarks.sources"))
    about = f"{options.loaders} loader processes; {options.windows} windows of a second or more in turn, medians."
    update_section("Tar shards beside a folder", f"{about}\n\n{table}\n\n{where}")


if __name__ == "__main__":
    main()
