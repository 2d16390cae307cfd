"""Images/s of Echelon's input against torchvision's ImageFolder + DataLoader, with as many loader processes.

200 real ImageNet JPEGs (repeated by links, so that epochs are not all start and end): RandomResizedCrop 224, flip,
normalise, float32 batches in the trainer's process. All contenders are alive at once; windows of one epoch take turns,
so that all see the same machine. Then: the share of `data` in a small training run, by the phases' clock and by
torch.profiler.

    python -m benchmarks.input [--loaders 2] [--windows 7] [--repeat 5] [--batch-size 50] [--steps 4]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks._common import command_line, environment_line, markdown_table, median, paired_ratio, update_section
from benchmarks.fetch_data import fetch
from echelon.config import DataConfig
from echelon.data import LoaderConfig, Shard, TrainLoader, open_data
from echelon.observe.phases import PHASES, HostClock, Phase

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class Settings:
    """What all contenders have in common."""

    folder: Path
    loaders: int
    batch_size: int


@dataclass(frozen=True)
class Contender:
    """An input: `epoch(i)` gives the batches of one epoch, `close` ends its processes."""

    epoch: Callable[[int], Iterator[Any]]
    close: Callable[[], None]


def links(source: Path, target: Path, repeat: int) -> Path:
    """Make an image folder of `repeat` links to each image, for training and (one each) for evaluation."""
    for image in sorted(source.rglob("*.JPEG")):
        for part, count in (("train", repeat), ("val", 1)):
            folder = target / part / image.parent.name
            folder.mkdir(parents=True, exist_ok=True)
            for i in range(count):
                (folder / f"{i}-{image.name}").symlink_to(image)
    return target


def ours(settings: Settings) -> Contender:
    """Build Echelon's loader."""
    config = DataConfig(
        source=str(settings.folder), batch_size=settings.batch_size, loaders=settings.loaders, follow_links=True
    )
    loader_config = LoaderConfig.of(config, 0, torch.device("cpu"))
    loader = TrainLoader(open_data(config, 0), loader_config, Shard(0, 1))
    return Contender(lambda epoch: ((b.inputs, b.targets) for b in loader.epoch(epoch)), loader.close)


def _torchvision(settings: Settings, transform: Any, read: Callable[[str], Any] | None) -> Contender:
    from torch.utils.data import DataLoader
    from torchvision.datasets import ImageFolder

    train = str(settings.folder / "train")
    data = ImageFolder(train, transform, loader=read) if read else ImageFolder(train, transform)
    loader = DataLoader(
        data,
        settings.batch_size,
        shuffle=True,
        num_workers=settings.loaders,
        persistent_workers=settings.loaders > 0,
    )
    return Contender(lambda epoch: iter(loader), lambda: None)


def torchvision_pillow(settings: Settings) -> Contender:
    """Build what torchvision's reference training script does by default."""
    from torchvision.transforms import v2

    steps = [v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip(), v2.PILToTensor()]
    return _torchvision(settings, v2.Compose([*steps, v2.ToDtype(torch.float32, scale=True), _normalise()]), None)


def torchvision_tensor(settings: Settings) -> Contender:
    """Build the faster of torchvision's ways: its own JPEG decoder, transforms on uint8 tensors."""
    from torchvision.io import ImageReadMode, decode_image
    from torchvision.transforms import v2

    steps = [v2.RandomResizedCrop(224, antialias=True), v2.RandomHorizontalFlip()]
    transform = v2.Compose([*steps, v2.ToDtype(torch.float32, scale=True), _normalise()])
    return _torchvision(settings, transform, lambda path: decode_image(path, mode=ImageReadMode.RGB))


def _normalise() -> Any:
    from torchvision.transforms import v2

    return v2.Normalize(MEAN, STD)


CONTENDERS = {
    "Echelon": ours,
    "torchvision (Pillow)": torchvision_pillow,
    "torchvision (tensor)": torchvision_tensor,
}


def measure(settings: Settings, windows: int) -> dict[str, list[float]]:
    """Return images/s of each window, by contender; the first window is warm-up."""
    alive = {name: build(settings) for name, build in CONTENDERS.items()}
    rates: dict[str, list[float]] = {name: [] for name in alive}
    for window in range(windows + 1):
        for name in list(alive) if window % 2 else list(alive)[::-1]:
            began = time.perf_counter()
            images = sum(len(targets) for _, targets in alive[name].epoch(window))
            if window:
                rates[name].append(images / (time.perf_counter() - began))
    for contender in alive.values():
        contender.close()
    return rates


def data_share(settings: Settings, steps: int) -> tuple[float, float]:
    """Return the share of waiting for data in a small training run: (by the phases' clock, by torch.profiler)."""
    from torch.profiler import ProfilerActivity, profile, record_function
    from torchvision.models import resnet18

    model = resnet18(num_classes=1000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = ours(settings)
    batches = (batch for epoch in range(10**6) for batch in loader.epoch(epoch))
    clock = HostClock()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        clock.drain()
        for _ in range(steps):
            clock.enter(Phase.DATA)
            with record_function("phase: data"):
                inputs, targets = next(batches)
            clock.enter(Phase.FORWARD)
            with record_function("phase: compute"):
                torch.nn.functional.cross_entropy(model(inputs), targets).backward()
                optimizer.step()
                optimizer.zero_grad()
        seconds = dict(zip(PHASES, clock.drain(), strict=True))
    loader.close()
    profiled = {event.key: event.cpu_time_total for event in profiler.key_averages()}
    data, compute = profiled["phase: data"], profiled["phase: compute"]
    return seconds[Phase.DATA] / sum(seconds.values()), data / (data + compute)


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("loaders", 2), ("windows", 7), ("repeat", 5), ("batch-size", 50), ("steps", 4)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        images = links(fetch("imagenet-sample"), Path(folder), options.repeat)
        settings = Settings(images, options.loaders, options.batch_size)
        rates = measure(settings, options.windows)
        base = rates["Echelon"]
        rows = [
            (name, f"{median(windows):.0f}", f"{paired_ratio(base, windows):.2f}") for name, windows in rates.items()
        ]
        table = markdown_table(("input", "images/s (median)", "Echelon / this (median of paired windows)"), rows)
        print(table)
        clock, profiler = data_share(replace(settings, loaders=0), options.steps)
    share = f"Share of `data` without loaders: {clock:.1%} by the clock, {profiler:.1%} by torch.profiler."
    where = environment_line(command_line("benchmarks.input"))
    about = (
        f"200 ImageNet JPEGs, RandomResizedCrop 224, flip, normalise; {options.loaders} loader processes, "
        f"{options.windows} windows of one epoch in turn."
    )
    print(share)
    update_section("Input", f"{where}\n\n{about}\n\n{table}\n\n{share}")


if __name__ == "__main__":
    main()
